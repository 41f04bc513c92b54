"""Recurrent networks whose states come from another rank, or go to one."""

from __future__ import annotations

from typing import Any

import chainer
from chainer.links.rnn.n_step_rnn import NStepRNNBase

from chainermn_comm import CommunicatorBase, Sharding

from ..functions import check_edge, recv_variables, send_variables
from ..loss_scaling import refuse_unshared_scale
from .shardings import ShardedLink


def create_multi_node_n_step_rnn(
    actual_link: Any,
    communicator: CommunicatorBase,
    rank_in: int | None = None,
    rank_out: int | None = None,
) -> MultiNodeNStepRNN:
    """Make a stacked RNN that gets its first states from, or sends its last ones to, a rank.

    Making the link is not collective. An encoder and a decoder on two ranks::

        # rank 0
        encoder = create_multi_node_n_step_rnn(L.NStepLSTM(...), comm, rank_out=1)
        _, _, _, delegate_variable = encoder(xs)
        delegate_variable.backward()
        # rank 1
        decoder = create_multi_node_n_step_rnn(L.NStepLSTM(...), comm, rank_in=0)
        _, _, ys, _ = decoder(ts)

    Args:
        actual_link: a ``NStep...`` link of Chainer, uni- or bidirectional, or a link of
            the user's with the same base class.
        communicator: a communicator that has these ranks.
        rank_in: the rank that sends the first states, whose ``rank_out`` is this rank;
            None to start from the states that the call passes.
        rank_out: the rank to which the last states go; None to keep them.

    Returns:
        The link; see :class:`MultiNodeNStepRNN`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there is no such other rank.
    """
    if not isinstance(actual_link, NStepRNNBase):  # subclasses of users, too
        raise TypeError(
            "create_multi_node_n_step_rnn takes a link such as NStepLSTM, NStepBiGRU or "
            f"NStepRNNTanh, not {type(actual_link).__name__}"
        )
    for rank in (rank_in, rank_out):
        if rank is not None:
            check_edge(communicator, rank)
    return MultiNodeNStepRNN(actual_link, communicator, rank_in, rank_out)


class MultiNodeNStepRNN(ShardedLink, chainer.Chain):
    """A stacked RNN that receives its first states, or sends its last ones.

    A call takes ``xs``, as ``actual_rnn`` does. Without ``rank_in``, the first states
    may be passed before ``xs``: ``hx, cx`` of an LSTM, ``hx`` of other networks. A call
    returns the results of ``actual_rnn``, ``hy, cy, ys`` or ``hy, ys``, and a delegate
    variable, which is None without ``rank_out``. So that the gradients of the states
    come back, call the delegate variable's ``backward``, or connect it to the loss by
    :func:`~chainermn.functions.pseudo_connect`.

    Attributes:
        actual_rnn: the actual link.
    """

    def __init__(
        self,
        actual_rnn: Any,
        comm: CommunicatorBase,
        rank_in: int | None,
        rank_out: int | None,
    ) -> None:
        super().__init__()
        self.communicator = comm
        self.rank_in = rank_in
        self.rank_out = rank_out
        with self.init_scope():
            self.actual_rnn = actual_rnn

    def _sharding(self, param: Any) -> Sharding | None:
        if self.rank_in is None and self.rank_out is None:
            return None
        return Sharding("placed", self.communicator)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Run the network; see the class.

        Raises:
            TypeError: the call passes states although they come from another rank.
            ValueError: the other rank has sent states of another kind of network.
            RuntimeError: the call is part of the ``update`` of an optimizer that adapts
                a loss scale for this rank alone; see :func:`share_loss_scale`.
        """
        *states, xs = inputs
        here = self.communicator.rank
        refuse_unshared_scale(here)
        cells = self.actual_rnn.n_cells
        delegate = None
        if self.rank_in is not None:
            if states:
                raise TypeError(
                    f"rank {here}: the states come from rank {self.rank_in}, so the call "
                    "takes xs only"
                )
            received, node = recv_variables(self.communicator, self.rank_in)
            states = list(received)
            if node is not None:
                delegate = node.delegate_output()
            if len(states) != cells:
                raise ValueError(
                    f"rank {here}: {type(self.actual_rnn).__name__} has {cells} state(s), and "
                    f"rank {self.rank_in} sent {len(states)}; both must be of the same kind"
                )
        outputs = self.actual_rnn(*(states or (None,) * cells), xs)
        if self.rank_out is None:
            return *outputs, None
        sent = send_variables(
            outputs[:-1], self.communicator, self.rank_out, delegate=delegate
        )
        return *outputs, sent

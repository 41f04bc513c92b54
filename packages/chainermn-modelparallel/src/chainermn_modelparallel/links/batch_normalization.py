"""`MultiNodeBatchNormalization`: batch normalization of a batch that several ranks share."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.links as L
from chainer import Variable, backend

from chainermn_comm import CommunicatorBase
from chainermn_comm.errors import raise_together

from ..functions import (
    SCOPE,
    SyncBatchNormFunction,
    check_communicator,
    check_variable,
    empty_on_device_of,
    get_communication_backend,
    requires_grad_mask,
)

_OPERATION = SCOPE + SyncBatchNormFunction.label


class MultiNodeBatchNormalization(L.BatchNormalization):
    """Batch normalization by the statistics of all ranks' batches together.

    The link computes what :class:`chainer.links.BatchNormalization` computes of one
    batch that consists of all ranks' batches. These may have different sizes, or be
    empty. The running statistics are those of the whole batch, the same on all ranks.
    Parameters, persistent values and their names are those of
    :class:`chainer.links.BatchNormalization`, so either link can load a snapshot of the
    other.

    While ``chainer.config.train`` is true, calling the link is collective. Backward is
    collective, too, if any rank's input needs a gradient: it must run on every rank,
    even with an empty batch. Each takes one exchange, or two if there are more than a few
    channels. An input gets the gradient of the sum of all ranks' losses. ``gamma`` and
    ``beta`` get this rank's share of their gradients, which
    :func:`create_multi_node_optimizer` averages like all gradients.
    While ``chainer.config.train`` is false, the link uses its running statistics and
    doesn't communicate.

    Args:
        size: the number of channels, or their shape if they have several axes; None if
            ``axis`` is given.
        comm: the communicator, all of whose ranks take part.
        decay: the share of the running statistics that each call keeps.
        eps: added to the variance.
        dtype: the dtype of the parameters and running statistics. None for
            ``chainer.config.dtype``, or float32 if that is not set or ``mixed16``, as in
            Chainer's link. A batch's statistics are computed in float32 or wider.
        use_gamma: whether a parameter scales the result.
        use_beta: whether a parameter is added to the result.
        initial_gamma: initializer, number or array; 1 by default.
        initial_beta: initializer, number or array; 0 by default.
        communication_backend: ``"auto"``, ``"mpi"`` or ``"nccl"``, all with the same
            effect: statistics are small, and travel by the communicator's ``handshake``
            through host memory.
        axis: the axes that are averaged over, as for :class:`chainer.links.BatchNormalization`.
        initial_avg_mean: as for :class:`chainer.links.BatchNormalization`.
        initial_avg_var: as for :class:`chainer.links.BatchNormalization`.

    Raises:
        TypeError: ``comm`` is no communicator.
        ValueError: there is no such ``communication_backend``.
    """

    def __init__(
        self,
        size: Any,
        comm: CommunicatorBase,
        decay: float = 0.9,
        eps: float = 2e-5,
        dtype: Any = None,
        use_gamma: bool = True,
        use_beta: bool = True,
        initial_gamma: Any = None,
        initial_beta: Any = None,
        communication_backend: str = "auto",
        axis: Any = None,
        initial_avg_mean: Any = None,
        initial_avg_var: Any = None,
    ) -> None:
        check_communicator(comm)
        get_communication_backend(comm, communication_backend)
        super().__init__(
            size,
            decay,
            eps,
            dtype,
            use_gamma,
            use_beta,
            initial_gamma,
            initial_beta,
            axis,
            initial_avg_mean,
            initial_avg_var,
        )
        self.comm = comm
        self.communication_backend = communication_backend

    def forward(self, x: Any, finetune: bool = False) -> Variable:
        """Normalize this rank's part of the batch (collective while training).

        Args:
            x: a variable or an array of floats with the shape ``(N, size, ...)``, or as
                ``axis`` says. ``N`` may differ between ranks, and may be 0.
            finetune: whether running statistics accumulate with equal weights, as in
                :class:`chainer.links.BatchNormalization`.

        Returns:
            A variable of x's shape and dtype.

        Raises:
            TypeError: ``x`` is no variable or array of floats, or is on another device.
            ValueError: the shape of ``x`` doesn't fit.
            PeerError: another rank raised one of these.
            RankMismatchError: ranks call different functions or links, or their
                channels differ; raised on all ranks.
        """
        if not chainer.config.train:
            return super().forward(x, finetune=finetune)
        with raise_together(self.comm.handshake, _OPERATION, meet=False):
            x, axis = self._check_input(x)
        gamma = self.gamma
        if gamma is None:
            (gamma,) = self._get_gamma()
        beta = self.beta
        if beta is None:
            (beta,) = self._get_beta()
        needs_grad = 1 in requires_grad_mask((x,))
        node = SyncBatchNormFunction(self.comm, self.eps, axis, needs_grad)
        leaf = Variable(empty_on_device_of(x.array))
        y, _ = node.apply((x, gamma, beta, leaf))
        if chainer.config.in_recomputing or node.count == 0:  # an empty batch has none
            return y
        decay = self.decay
        if finetune:
            self.N += 1
            decay = 1.0 - 1.0 / self.N
        unbiased = node.count / max(node.count - 1.0, 1.0)
        with chainer.using_device(self.device):
            _move(self.avg_mean, node.mean, decay)
            _move(self.avg_var, node.var * unbiased, decay)
        return y

    def _check_input(self, x: Any) -> tuple[Variable, tuple[int, ...]]:
        """Return x as a variable, and the axes that are averaged over; raise if x doesn't fit."""
        rank = self.comm.rank
        x = check_variable("x", x, rank)
        if x.dtype.kind != "f":
            raise TypeError(f"rank {rank}: x must be an array of floats")
        if backend.get_array_module(x.array) is not self.xp:
            raise TypeError(
                f"rank {rank}: x is on another device than the link; move one with to_device"
            )
        axis: tuple[int, ...] = self.axis
        if axis is None:  # the channels' axes follow the first axis
            axis = (0, *range(self.avg_mean.ndim + 1, x.ndim))
        shape = tuple(n for i, n in enumerate(x.shape) if i not in axis)
        has_axes = x.ndim > max(axis)
        if self.avg_mean is None and has_axes:
            self._initialize_params(shape)
        if not has_axes or shape != self.avg_mean.shape:
            known = getattr(self.avg_mean, "shape", "(...)")
            raise ValueError(
                f"rank {rank}: x of shape {x.shape} doesn't have the channels {known} "
                f"beside the axes {axis}"
            )
        return x, axis


def _move(average: Any, value: Any, decay: float) -> None:
    """Average a batch's statistics into the running statistics, in place."""
    average *= decay
    average += (1 - decay) * value.reshape(average.shape)

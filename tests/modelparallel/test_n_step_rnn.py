"""Recurrent networks over ranks give what one network gives in one process."""

from __future__ import annotations

from copy import deepcopy

import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import no_backprop_mode
from chainer.links.rnn.n_step_rnn import NStepRNNBase
from chainer.optimizers import SGD
from numpy.random import default_rng
from numpy.testing import assert_allclose

from chainermn_modelparallel import create_multi_node_n_step_rnn, pseudo_connect

pytestmark = pytest.mark.world


class CustomRNN(NStepRNNBase):
    """A kind of its own, as users may derive from Chainer's base."""

    n_weights = 2
    use_bi_direction = False
    n_cells = 1

    def rnn(self, *args):
        return F.n_step_rnn(*args, activation="relu")

    def forward(self, hx, xs, **kwargs):
        (hy,), ys = self._call([hx], xs, **kwargs)
        return hy, ys


KINDS = (L.NStepLSTM, L.NStepBiLSTM, L.NStepBiGRU, L.NStepRNNTanh, CustomRNN)
LAYERS = 2
UNITS = 3
LENGTHS = (4, 2, 3)


def rnn_of(kind, seed):
    link = kind(LAYERS, UNITS, UNITS, 0.0)
    random = default_rng(seed)
    for _, param in sorted(link.namedparams()):
        param.array = random.normal(size=param.shape)
    link.cleargrads()  # which are NaN of the old dtype
    return link


def sequences(seed):
    random = default_rng(seed)
    return [random.normal(size=(length, UNITS)) for length in LENGTHS]


def loss_of(outputs):
    *states, ys = outputs
    return sum(F.sum(y * y) for y in [*states, *ys])


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("kind", "own"), [*((kind, False) for kind in KINDS), (L.NStepLSTM, True)]
)
def test_states_and_their_gradients_cross_ranks(comm, kind, own):
    """A chain over all ranks: each starts from the states that the one before ended with.

    The last has a loss; where each has its `own`, they are connected to the delegates.
    """
    links = [rnn_of(kind, rank) for rank in range(comm.size)]
    states = [None] * links[0].n_cells
    losses = []
    for rank, link in enumerate(links):
        *states, ys = link(*states, sequences(rank))
        losses.append(loss_of([ys]))
    own_losses = 0
    if own:
        own_losses = sum(losses[:-1])
    (loss_of([*states, ys]) + own_losses).backward()

    last = comm.rank == comm.size - 1
    rank_in = None
    if comm.rank:
        rank_in = comm.rank - 1
    if last:
        rank_out = None
    else:
        rank_out = comm.rank + 1
    mine = rnn_of(kind, comm.rank)
    link = create_multi_node_n_step_rnn(mine, comm, rank_in=rank_in, rank_out=rank_out)
    if comm.rank:
        given = []
    else:
        given = [None] * mine.n_cells
    *found, delegate = link(*given, sequences(comm.rank))
    if last:
        assert delegate is None
        for y, x in zip([*found[:-1], *found[-1]], [*states, *ys], strict=True):
            assert_allclose(y.array, x.array, rtol=1e-12, atol=1e-12)
        delegate = loss_of(found)
    elif own:
        delegate = pseudo_connect(delegate, loss_of(found[-1:]))
    delegate.backward()
    for param, expected in zip(mine.params(), links[comm.rank].params(), strict=True):
        assert_allclose(param.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.sizes(2)
def test_other_kinds_of_states_are_refused_by_name(comm):
    if comm.rank == 0:
        link = create_multi_node_n_step_rnn(rnn_of(L.NStepGRU, 0), comm, rank_out=1)
        with no_backprop_mode():
            link(sequences(0))
    else:
        link = create_multi_node_n_step_rnn(rnn_of(L.NStepLSTM, 0), comm, rank_in=0)
        with pytest.raises(TypeError, match="rank 1: the states come from rank 0"):
            link(None, None, sequences(0))
        with pytest.raises(
            ValueError, match=r"rank 1: NStepLSTM has 2 state.* rank 0 sent 1"
        ):
            link(sequences(0))


@pytest.mark.sizes(1, 2)
def test_wrong_arguments_and_copies(comm):
    gru = rnn_of(L.NStepGRU, 0)
    text = r"takes a link such as NStepLSTM.*, not Linear"
    with pytest.raises(TypeError, match=text):
        create_multi_node_n_step_rnn(L.Linear(2, 3), comm)
    with pytest.raises(ValueError, match="rank must be an integer from 0 to"):
        create_multi_node_n_step_rnn(gru, comm, rank_out=comm.size)
    link = create_multi_node_n_step_rnn(gru, comm)
    assert deepcopy(link).communicator is comm
    assert link(sequences(0))[-1] is None
    names = [name for name, _ in link.namedparams()]
    assert set(names) == {"/actual_rnn" + name for name, _ in gru.namedparams()}


@pytest.mark.sizes(2, 3, 4)
def test_a_loss_scale_of_each_rank_is_refused(comm):
    """Before anything is sent, so on each rank that adapts its own."""
    peer = (comm.rank + 1) % comm.size
    rnn = create_multi_node_n_step_rnn(L.NStepGRU(1, 2, 2, 0), comm, rank_out=peer)
    optimizer = SGD().setup(rnn)
    optimizer.loss_scaling()
    with pytest.raises(RuntimeError, match="share_loss_scale"):
        optimizer.update(rnn, [np.ones((1, 2), "f")])

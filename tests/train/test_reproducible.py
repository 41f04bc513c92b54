"""A whole training over `reproducible=True` ends with the same bits, whoever is on which node."""

from __future__ import annotations

import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Chain
from chainer.optimizer_hooks import GradientClipping, WeightDecay
from chainer.optimizers import Adam
from numpy.random import RandomState

from chainermn_modelparallel import MultiNodeBatchNormalization, allreduce
from chainermn_train.extensions import AllreducePersistent
from tests.support.plugins.pairwise import in_full
from tests.support.training.exchanges import exchanging, states
from tests.support.training.trainers import state_of
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(4)]

# Names of communicators, and the nodes of four ranks.
TOPOLOGIES = {
    "flat": "0000",
    "single_node": "0000",
    "hierarchical": "0011",
    "naive": "0123",
    "two_dimensional": "0101",
    "non_cuda_aware": "0111",
}
UPDATES = 6
WIDTH = 40
CLASSES = 3


class Model(Chain):
    """Both batch normalizations, a sum over ranks within the loss, and a gradient clipped."""

    def __init__(self, comm):
        super().__init__()
        self.comm = comm
        with self.init_scope():
            self.first = L.Linear(WIDTH, 300)
            self.last = L.Linear(300, CLASSES)
            self.everyones = MultiNodeBatchNormalization(300, comm)
            self.own = L.BatchNormalization(300)

    def __call__(self, x, t):
        h = self.own(F.tanh(self.everyones(self.first(x))))
        loss = F.softmax_cross_entropy(self.last(h), t)
        return loss + 1e-3 * allreduce(self.comm, F.mean(h * h))


def batch(rank, number):
    random = RandomState((rank, number))
    magnitudes = 10.0 ** random.uniform(-12, 2, WIDTH)
    x = random.standard_normal((5 + rank, WIDTH)) * magnitudes
    return x.astype("f4"), random.randint(0, CLASSES, len(x)).astype("i4")


def trained(comm, kind, steps):
    """The bits of all that training leaves behind."""
    np.random.seed(7)
    model = Model(comm)
    adam = Adam(alpha=0.01)
    optimizer = exchanging(kind, comm, adam, model, steps)
    optimizer.add_hook(WeightDecay(1e-3))
    optimizer.add_hook(GradientClipping(0.05))
    for number in range(UPDATES):
        optimizer.update(model, *batch(comm.rank, number))
    optimizer.flush()
    optimizer.finalize()
    AllreducePersistent(model, comm)()
    persistent = {
        name: np.asarray(it).tobytes() for name, it in state_of(model).items()
    }
    return states(optimizer) | persistent


SOME = list(TOPOLOGIES)[:3]


@pytest.mark.parametrize("wire", [None, "float16"])
@pytest.mark.parametrize(
    ("names", "kinds", "steps", "reproducible"),
    [
        (TOPOLOGIES, ["synchronous", "overlap"], 1, True),
        (TOPOLOGIES, ["double buffering"], 1, True),
        *in_full(
            (TOPOLOGIES, ["synchronous", "overlap"], 2, True),
            (TOPOLOGIES, ["double buffering"], 2, True),
        ),
        # Else the other cases would tell nothing.
        (SOME, ["synchronous"], 1, False),
    ],
)
def test_training_ends_with_the_same_bits_over_all_topologies(
    world, names, kinds, steps, reproducible, wire
):
    settings = {"allreduce_grad_dtype": wire, "reproducible": reproducible}
    found = []
    for name in names:
        for kind in kinds:
            with on_nodes(TOPOLOGIES[name], name, **settings) as comm:
                found.append(trained(comm, kind, steps))
    assert all(bits == found[0] for bits in found) == reproducible
    assert world.allgather(found) == [found] * world.size

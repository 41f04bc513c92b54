"""Trainings on real devices beside one process on a CPU: every exchange, scales, drift, snapshots.

Not on the double, which does no arithmetic.
"""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import pytest
from chainer import Sequential
from chainer.optimizers import Adam, MomentumSGD
from numpy.random import default_rng

from chainermn_comm import RankMismatchError, create_communicator
from tests.support.doubles import gpus
from tests.support.doubles.gpus import NCCL, STAGED
from tests.support.training.exchanges import WHOLE_KINDS, OneProcess, exchanging
from tests.support.training.trainers import (
    assert_near,
    same_everywhere,
)

pytestmark = [pytest.mark.gpu, pytest.mark.world, pytest.mark.sizes(1, 2, 4)]

ROWS = 8  # of a rank's batch


@pytest.fixture(params=[*STAGED, *NCCL])
def comm(request, world, device):
    if request.param in NCCL:
        gpus.one_each(world)
    with create_communicator(request.param) as communicator:
        yield communicator


def network():
    """The same weights on each call."""
    random = default_rng(0)

    def linear(n_in, n_out):
        return L.Linear(
            n_in, n_out, initialW=random.standard_normal((n_out, n_in)).astype("f4")
        )

    return L.Classifier(Sequential(linear(6, 40), F.relu, linear(40, 3)))


def network_on_gpu():
    """On the current device."""
    device = chainer.backends.cuda.cupy.cuda.Device()
    model = network()
    model.to_device(f"@cupy:{device.id}")
    return model


def batches(number, ranks):
    """Of all ranks put together."""
    random = default_rng(1)
    rows = ROWS * ranks
    return [
        (
            random.standard_normal((rows, 6)).astype("f4"),
            random.integers(0, 3, rows).astype("i4"),
        )
        for _ in range(number)
    ]


def mine(comm, batch):
    """A rank's rows, on its device."""
    rows = slice(ROWS * comm.rank, ROWS * (comm.rank + 1))
    return [gpus.put(part[rows]) for part in batch]


def scaled(optimizer, scale):
    if scale == "dynamic":
        optimizer.loss_scaling(interval=3, scale=2.0**8)
    return optimizer


@pytest.mark.parametrize("scale", ["none", "dynamic"])
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", WHOLE_KINDS)
def test_a_training_is_that_of_one_process(comm, kind, steps, scale):
    on_gpus = network_on_gpu()
    on_cpu = network()
    optimizer = exchanging(kind, comm, scaled(MomentumSGD(0.05), scale), on_gpus, steps)
    one = OneProcess(kind, MomentumSGD(0.05).setup(on_cpu), steps)
    for batch in batches(8, comm.size):
        optimizer.update(on_gpus, *mine(comm, batch))
        one.update(*batch)
    optimizer.flush()
    one.flush()
    for param in on_gpus.params():
        assert gpus.on_gpu(param.array)
    assert same_everywhere(comm, on_gpus)
    on_gpus.to_device("@numpy")
    assert_near(on_gpus, on_cpu, 1e-4)


@pytest.mark.parametrize("kind", WHOLE_KINDS)
@pytest.mark.parametrize("what", ["parameter", "momentum"])
@pytest.mark.sizes(2, 4)
def test_drift_on_a_device_is_noticed(comm, what, kind):
    model = network_on_gpu()
    optimizer = exchanging(kind, comm, Adam(), model)
    data = batches(20, comm.size)
    for _ in range(2):  # with double buffering the second one steps
        optimizer.update(model, *mine(comm, data[0]))
    weights = model.predictor[0].W
    if comm.rank == comm.size - 1:
        drifting = weights.array
        if what == "momentum":
            drifting = weights.update_rule.state["m"]
        drifting[3, 2] += 1

    def go_on():
        for batch in data:
            optimizer.update(model, *mine(comm, batch))

    with pytest.raises(RankMismatchError, match="/predictor/0/W"):
        go_on()
    optimizer.synchronize()
    optimizer.update(model, *mine(comm, data[0]))
    assert same_everywhere(comm, model)

"""Every communicator on real devices, one a rank where there are enough."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import create_communicator, devices
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.topology import Topology
from tests.support.models import Model, Param

pytestmark = [pytest.mark.gpu, pytest.mark.world]

STAGED = ("naive", "flat")
NCCL = ("hierarchical", "two_dimensional", "single_node", "pure_nccl", "non_cuda_aware")
SHAPES = [(), (0,), (3, 5), (1 << 20,), (700, 600), (9_000_001,)]


@pytest.fixture(autouse=True)
def device(world):
    """The rank's device is the current one."""
    import cupy

    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()


def one_device_a_rank(world) -> None:
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if world.size > count:
        pytest.skip(f"NCCL wants a device for each of {world.size} ranks, and there are {count}")


def values(rank: int, dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(rank)
    return [np.array(rng.standard_normal(shape)).astype(dtype) for shape in SHAPES]


def mean(comm, arrays: list[np.ndarray]) -> list[np.ndarray]:
    grads = [devices.to_device(array) for array in arrays]
    comm.allreduce_grad(Model(**{f"p{i}": Param(grad, grad) for i, grad in enumerate(grads)}))
    return [devices.to_host(grad) for grad in grads]


def check(comm, dtype: str, wire: str | None) -> None:
    comm.set_config("allreduce_grad_dtype", wire)
    means = mean(comm, values(comm.rank, dtype))
    terms = [values(rank, dtype) for rank in range(comm.size)]
    eps = float(max(np.finfo(dtype).eps, np.finfo(wire or dtype).eps))
    for index, got in enumerate(means):
        rows = [np.asarray(row[index], "f8") for row in terms]
        bound = 4 * eps * sum(map(np.abs, rows)) / comm.size + 1e-6
        assert got.dtype == dtype
        assert np.all(np.abs(got - sum(rows) / comm.size) <= bound)
    mine = [got.tobytes() for got in means]
    assert all(theirs == mine for theirs in comm.allgather_obj(mine))
    assert [got.tobytes() for got in mean(comm, values(comm.rank, dtype))] == mine


@pytest.mark.parametrize("wire", [None, "float16", "float32", "float64"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", STAGED + NCCL)
def test_means(world, name, dtype, wire):
    if name in NCCL:
        one_device_a_rank(world)
    with create_communicator(name) as comm:
        check(comm, dtype, wire)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("name", ["hierarchical", "two_dimensional"])
def test_means_over_imposed_nodes(world, name):
    one_device_a_rank(world)
    for nodes in {(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)}:
        with make_communicator(name, topology=Topology.of(nodes[-world.size :])) as comm:
            check(comm, "float32", None)


@pytest.mark.sizes(2, 3, 4)
def test_two_ranks_on_one_device_are_told(world):
    import cupy

    with (
        cupy.cuda.Device(0),
        create_communicator("pure_nccl") as comm,
        pytest.raises(ValueError, match=r"ranks \[0, 1"),
    ):
        mean(comm, [np.ones(2, "f4")])


def test_arrays_arrive_on_the_current_device(world):
    import cupy

    with create_communicator("naive") as comm:
        mine = devices.to_device(np.full((2, 3), comm.rank, "f4"))
        for rank, array in enumerate(comm.allgather(mine)):
            assert array.device == cupy.cuda.Device()
            np.testing.assert_array_equal(devices.to_host(array), np.full((2, 3), rank, "f4"))


@pytest.mark.parametrize("name", STAGED + NCCL)
def test_back_to_back_calls_do_not_mix(world, name):
    if name in NCCL:
        one_device_a_rank(world)
    with create_communicator(name) as comm:
        for call in range(100):
            n = (call % 3) * 9_000_000 + 5
            (got,) = mean(comm, [np.full(n, comm.rank + call, "f4")])
            # Divided before they are summed, thirds are rounded.
            np.testing.assert_allclose(got, call + (world.size - 1) / 2, rtol=1e-6)

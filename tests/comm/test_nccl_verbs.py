"""Arrays on GPUs through every verb, with a double of CuPy in place of a device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from chainermn_comm import PeerError, create_communicator, devices
from tests.support.cupy_double import installed
from tests.support.models import Model, Param
from tests.support.samples import DTYPES, LAYOUTS, same, sample

pytestmark = pytest.mark.world


@pytest.fixture
def comm() -> Iterator:
    """A communicator of processes with a device each."""
    with installed(), create_communicator("hierarchical") as communicator:
        yield communicator


def on_gpu(rank: int, dtype: str = "float32", layout: str = "C"):
    array = sample(rank, dtype, layout)
    if layout == "slice":
        return devices.to_device(sample(rank, dtype))[1:, ::2]
    if layout == "reversed":
        return devices.to_device(sample(rank, dtype))[::-1, ::-1]
    return devices.to_device(array)


def check(actual, expected: np.ndarray) -> None:
    assert devices.on_gpu(actual)
    same(devices.to_host(actual), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_array_arrives_on_the_gpu(comm, dtype, layout):
    for rank, array in enumerate(comm.allgather(on_gpu(comm.rank, dtype, layout))):
        check(array, sample(rank, dtype, layout))


@pytest.mark.sizes(2, 3, 4)
def test_send_and_recv(comm):
    if comm.rank == 0:
        comm.send((on_gpu(0), sample(0, "int8"), 3), dest=1)
    elif comm.rank == 1:
        there, here, scalar = comm.recv(source=0)
        check(there, sample(0, "float32"))
        same(here, sample(0, "int8"))
        assert scalar == 3


def test_collective_verbs(comm):
    last = comm.size - 1
    for rank, array in enumerate(comm.gather(on_gpu(comm.rank), root=last) or ()):
        check(array, sample(rank, "float32"))
    check(
        comm.bcast(on_gpu(comm.rank) if comm.rank == last else None, root=last), sample(last, "f4")
    )
    mine = [on_gpu(rank) for rank in range(comm.size)]
    check(comm.scatter(mine if comm.rank == 0 else None), sample(comm.rank, "f4"))
    for array in comm.alltoall([on_gpu(comm.rank)] * comm.size)[:1]:
        check(array, sample(0, "float32"))
    rows = [sample(rank, "float32") for rank in range(comm.size)]
    check(comm.allreduce(on_gpu(comm.rank)), np.sum(rows, axis=0))
    check(comm.multi_node_mean(on_gpu(comm.rank)), np.mean(rows, axis=0, dtype="f4"))


def test_mean_into_an_array_on_either_side(comm):
    rows = [sample(rank, "float64") for rank in range(comm.size)]
    mean = np.sum(rows, axis=0) / comm.size
    for sent in (on_gpu(comm.rank, "float64"), sample(comm.rank, "float64")):
        there, here = devices.to_device(np.zeros_like(mean)), np.zeros_like(mean)
        assert comm.multi_node_mean(sent, there) is there
        assert comm.multi_node_mean(sent, here) is here
        same(devices.to_host(there), mean)
        same(here, mean)


def test_ranks_may_hold_their_arrays_here_and_there(comm):
    mine = on_gpu(comm.rank) if comm.rank == 0 else sample(comm.rank, "float32")
    first, *others = comm.allgather(mine)
    check(first, sample(0, "float32"))
    for rank, array in enumerate(others, start=1):
        same(array, sample(rank, "float32"))


@pytest.mark.sizes(2, 3, 4)
def test_a_receiver_without_a_gpu_is_told(comm, monkeypatch):
    if comm.rank == 1:
        devices._cupy().cuda.runtime.getDeviceCount = lambda: 0
        with pytest.raises(RuntimeError, match=r"sent from a GPU.*CUDA finds no device"):
            comm.recv(source=0)
    elif comm.rank == 0:
        comm.send(on_gpu(0), dest=1)
    assert comm.allreduce_obj(1) == comm.size


def test_bcast_data_fills_parameters_where_they_lie(comm):
    there, turned = on_gpu(comm.rank), on_gpu(comm.rank, "float64").T
    here = sample(comm.rank, "float16").copy()
    comm.bcast_data(Model(a=Param(there), b=Param(turned), c=Param(here)))
    check(there, sample(0, "float32"))
    np.testing.assert_array_equal(devices.to_host(turned), sample(0, "float64").T)
    same(here, sample(0, "float16"))


@pytest.mark.sizes(2, 3, 4)
def test_other_libraries_gpu_arrays_are_told(comm):
    class Foreign:
        __cuda_array_interface__ = None

    wrong = comm.rank == 1
    with pytest.raises(TypeError if wrong else PeerError, match=r"only CuPy's.*Foreign"):
        comm.allgather(Foreign() if wrong else on_gpu(comm.rank))

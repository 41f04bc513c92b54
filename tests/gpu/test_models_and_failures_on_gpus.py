"""On real devices: models that are not alike, failures of a rank, splits, and what is left behind.

`flat` goes through MPI, so that two ranks may share a device; the others need one a rank.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest

from chainermn_comm import (
    CommunicationError,
    PeerError,
    RankMismatchError,
    create_communicator,
    devices,
    kernels,
)
from tests.support.models import Model, Param

from .test_communicators_on_gpus import NCCL, mean, one_device_a_rank

pytestmark = [pytest.mark.gpu, pytest.mark.world]

NAMES = ("flat", "pure_nccl", "hierarchical", "two_dimensional")
# Communicators that are made and released: before memory is looked at, and then.
WARM_UP, MADE = 10, 60
# NCCL and CUDA may keep some memory for later; one communicator of NCCL's takes megabytes.
MIB_LEFT = 64


@pytest.fixture(autouse=True)
def device(world):
    """The rank's device is the current one."""
    import cupy

    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()


@pytest.fixture(params=NAMES)
def name(request, world) -> str:
    if request.param in NCCL:
        one_device_a_rank(world)
    return request.param


def put(*values: float, dtype: str = "float32"):
    return devices.to_device(np.array(values, dtype))


def assert_mean(comm) -> None:
    (got,) = mean(comm, [np.full(1000, comm.rank, "f4")])
    np.testing.assert_allclose(got, (comm.size - 1) / 2, rtol=1e-6)


@pytest.mark.parametrize("wire", [None, "float16", "float32"])
def test_mixed_dtypes_in_one_model(world, name, wire):
    dtypes = ["float16", "float64", "float32"] * 20
    with create_communicator(name, allreduce_grad_dtype=wire) as comm:
        arrays = [np.full((300, i), comm.rank + i, dtype) for i, dtype in enumerate(dtypes)]
        for i, got in enumerate(mean(comm, arrays)):
            assert got.dtype == dtypes[i]
            np.testing.assert_allclose(got, i + (comm.size - 1) / 2, rtol=4e-3)


def test_missing_gradients_count_as_zeros_with_zero_fill(world, name):
    with create_communicator(name) as comm:
        model = Model(
            here=Param(put(0, 0), put(3, 6)),
            some=Param(put(0, 0), put(3, 6) if comm.rank == 0 else None),
            none=Param(put(0, 0), None),
        )
        for _ in range(2):  # the second time nothing is missing but what is so everywhere
            comm.multi_node_mean_grad(model, zero_fill=True)
            assert devices.on_gpu(model["some"].grad)
            got = devices.to_host(model["some"].grad)
            np.testing.assert_allclose(got, np.array([3, 6]) / comm.size, rtol=1e-6)
            assert model["none"].grad is None
        np.testing.assert_allclose(devices.to_host(model["here"].grad), [3, 6], rtol=1e-6)


@pytest.mark.sizes(2, 3, 4)
def test_without_zero_fill_ranks_must_agree_what_is_missing(world, name):
    with create_communicator(name) as comm:
        grad = put(3, 6) if comm.rank == 0 else None
        with pytest.raises(RankMismatchError, match=r"/w float32 \(2,\).*no gradient"):
            comm.allreduce_grad(Model(w=Param(put(0, 0), grad)))
        model = Model(w=Param(put(0, 0), None), v=Param(put(0), put(comm.rank)))
        comm.allreduce_grad(model)  # missing on all ranks
        assert model["w"].grad is None
        assert_mean(comm)


@pytest.mark.sizes(2, 3, 4)
def test_models_that_differ_are_told(world, name):
    with create_communicator(name) as comm:
        dtype = "float64" if comm.rank == 0 else "float32"
        with pytest.raises(RankMismatchError, match=r"/p0 float64 \(2,\).*; /p0 float32"):
            mean(comm, [np.ones(2, dtype)])
        where = devices.to_device if comm.rank == 0 else np.array
        odd = Model(w=Param(where(np.ones(2)), where(np.ones(2))))
        with pytest.raises(RankMismatchError, match=r"/w float64 \(2,\) on a GPU"):
            comm.allreduce_grad(odd)
        assert_mean(comm)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("when", ["before any work", "pack", "unpack"])
def test_a_rank_that_fails_raises_on_every_rank(world, name, monkeypatch, when):
    failing, launch = world.rank == world.size - 1, kernels.launch

    def fail(verb, *args) -> None:
        if verb == when:
            raise RuntimeError("out of order")
        launch(verb, *args)

    with create_communicator(name) as comm:
        assert_mean(comm)
        if failing and when == "before any work":  # told by the agreement: it stays usable
            monkeypatch.setattr(devices, "pinned", lambda _: fail(when))
            with pytest.raises(RuntimeError, match="out of order"):
                assert_mean(comm)
        elif failing:
            monkeypatch.setattr(kernels, "launch", fail)
            with pytest.raises(CommunicationError, match="out of order"):
                assert_mean(comm)
        elif when == "before any work":
            with pytest.raises(PeerError, match=f"rank {world.size - 1}.*out of order"):
                assert_mean(comm)
        elif when == "pack":
            with pytest.raises(CommunicationError, match=f"rank {world.size - 1} failed"):
                assert_mean(comm)
        else:  # the others have all that they need of it, and may be done before they hear
            mean_or_failure(comm)
        monkeypatch.undo()
        if when == "before any work":
            assert_mean(comm)
        elif when == "pack" or failing:
            earlier = CommunicationError
            with pytest.raises(earlier, match="failed in an earlier call"):
                assert_mean(comm)
        else:
            mean_or_failure(comm)
        assert comm.allreduce_obj(1) == world.size
    with create_communicator(name) as comm:
        assert_mean(comm)


def mean_or_failure(comm) -> None:
    try:
        assert_mean(comm)
    except CommunicationError as error:
        assert "failed" in str(error)  # noqa: PT017


def test_a_split_takes_the_same_way_and_keeps_settings(world, name):
    with create_communicator(name, allreduce_grad_dtype="float16") as comm:
        assert_mean(comm)
        with comm.split(comm.rank % 2, -comm.rank) as part:
            assert part.get_config() == comm.get_config()
            assert_mean(part)
            assert_mean(comm)
        assert_mean(comm)


def test_an_array_on_another_device_than_before_is_told(world, name):
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("takes two devices")
    with create_communicator(name) as comm:
        assert_mean(comm)
        here = cupy.cuda.Device().id
        with (
            cupy.cuda.Device((here + 1) % count),
            pytest.raises(ValueError, match="lies on device"),
        ):
            assert_mean(comm)
        assert_mean(comm)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("name", NCCL)
def test_ranks_on_one_device_are_told_by_each_name_and_others_serve(world, name):
    import cupy

    with cupy.cuda.Device(0):
        with create_communicator(name) as comm:
            for _ in range(2):
                with pytest.raises(ValueError, match=r"ranks \[0, 1.*get_device_from_id"):
                    assert_mean(comm)
            assert comm.allreduce_obj(1) == world.size
        with create_communicator("flat") as comm:
            assert_mean(comm)


def test_communicators_leave_no_memory_behind(world, name):
    import cupy

    pool = cupy.get_default_memory_pool()

    def make(times: int) -> tuple[int, int]:
        """Bytes in use of CuPy's pool afterwards, and free bytes of the device."""
        for _ in range(times):
            with create_communicator(name) as comm, comm.split(0, comm.rank) as part:
                assert_mean(comm)
                assert_mean(part)
        gc.collect()
        pool.free_all_blocks()
        world.Barrier()  # ranks may share the device
        found = pool.used_bytes(), cupy.cuda.runtime.memGetInfo()[0]
        world.Barrier()
        return found

    used, free = make(WARM_UP)
    used_later, free_later = make(MADE)
    assert used_later <= used
    assert free - free_later < MIB_LEFT << 20

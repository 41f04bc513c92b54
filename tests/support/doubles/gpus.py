"""GPUs as tests see them, by the same functions on the double and on a real device."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from mpi4py import MPI
from numpy.testing import assert_allclose

from chainermn_comm import CommunicatorBase
from chainermn_comm.gpu import devices, kernels, staging
from chainermn_comm.gpu_sums import watcher
from chainermn_comm.layout import Chunk, plan_chunks
from chainermn_comm.messaging import Handshake
from chainermn_comm.work import Work, in_background
from tests.support.doubles.cupy_double import installed
from tests.support.oracles.samples import sample
from tests.support.worlds.models import Model, Param

# Those that go through NCCL where a node has several ranks, and those that MPI serves
# alone.
NCCL = ("hierarchical", "two_dimensional", "single_node", "pure_nccl", "non_cuda_aware")
STAGED = ("naive", "flat")
DTYPES = ("float16", "float32", "float64")

on_gpu = devices.on_gpu
address = devices.address
pinned = devices.pinned
copy_to_device = devices.copy
why_none = devices.unavailable_reason
kernel_source = kernels.SOURCE
REGISTERS = kernels.REGISTERS
own_bus_id = devices.bus_id


class Real:
    """A rank's real device. What can be set of the double, to let it misbehave, does nothing."""

    def __init__(self, is_shared: bool):
        self.is_shared = is_shared  # by several ranks


@contextmanager
def real(world):
    """The rank's real device is the current one.

    Where ranks have to share devices, NCCL and our own check take each rank for a host
    of its own: NCCL then goes through sockets, slowly, but by all of its real calls.
    """
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(world.rank % count).use()
    with pytest.MonkeyPatch.context() as patch:
        if world.size > count:
            patch.setenv("NCCL_HOSTID", f"rank {world.rank}")
            patch.setenv("NCCL_SOCKET_IFNAME", "lo")
            patch.setattr(
                devices, "bus_id", lambda: f"{own_bus_id()} of rank {world.rank}"
            )
        yield Real(world.size > count)


@contextmanager
def of_kind(kind: str, world):
    """The rank's `device`, or its `double`, on whose streams nothing may be left."""
    if kind == "device":
        with real(world) as device:
            yield device
        return
    with installed() as device:
        yield device
        for stream in device.streams:
            device.drain(stream)


def to_host(array) -> np.ndarray:
    """A copy in host memory, in the array's order; the double doesn't count what tests look at."""
    found = array.get(order="A")
    if hasattr(array, "_gpu"):
        array._gpu.copied_to_host -= found.nbytes
    return found


def put(array: np.ndarray, layout: str = "C"):
    """The array on the current device, with a memory layout as `drawn_models` names them."""
    import cupy

    if layout == "reversed" and array.ndim:
        return cupy.asarray(np.ascontiguousarray(array[::-1]))[::-1]
    if layout == "strided" and array.ndim:
        return cupy.asarray(np.repeat(array, 2, axis=0))[::2]
    return cupy.asarray(array)


def put_sample(rank: int, dtype: str = "float32", layout: str = "C"):
    """What `samples.sample` gives, on the current device, and a view there where it is one here."""
    views = {"slice": np.s_[1:, ::2], "reversed": np.s_[::-1, ::-1], "empty": np.s_[:0]}
    if layout in views:
        return put(sample(rank, dtype))[views[layout]]
    return put(sample(rank, dtype, layout))


def model_of(arrays: Sequence[np.ndarray]) -> Model:
    """A model with copies of these gradients on the current device."""
    grads = [put(array) for array in arrays]
    return Model(**{f"p{i:03}": Param(grad, grad) for i, grad in enumerate(grads)})


def means_of(comm: CommunicatorBase, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The means over ranks of a model's gradients, which lie on GPUs meanwhile (collective)."""
    model = model_of(arrays)
    comm.allreduce_grad(model)
    return [to_host(model[name].grad) for name in model.params]


def mean_of(comm: CommunicatorBase, array: np.ndarray) -> np.ndarray:
    return means_of(comm, [array])[0]


def assert_mean(comm: CommunicatorBase, size: int = 1000):
    """Assert that gradients of 0, 1, ... by rank have the right mean (collective)."""
    mean = mean_of(comm, np.full(size, comm.rank, "f4"))
    expected = np.full(size, (comm.size - 1) / 2, "f4")
    assert_allclose(mean, expected, rtol=1e-6)


def settle(world, comm: CommunicatorBase):
    """Return once no rank has work under way that its thread looks after (collective)."""
    own = getattr(comm._backends[1], "_watcher", None)  # type: ignore[attr-defined]
    while own is not None and own.is_busy:
        time.sleep(1e-3)
    world.Barrier()


def wait_for_failure(comm: CommunicatorBase):
    """Return once the thread has seen a failure, or a call has raised one; no rank waits then."""
    while not comm._interruptions:  # type: ignore[attr-defined]
        time.sleep(1e-3)


def finalize_or_hear(comm: CommunicatorBase):
    """Raise what finalize does, or what the watching thread has seen before (collective)."""
    comm.finalize()
    comm.allreduce_obj(1)


def have_one_each(world) -> bool:
    """Whether no two ranks have the same device (collective)."""
    return len(set(world.allgather(devices.bus_id()))) == world.size


def one_each(world):
    """Skip the test where two ranks have the same device (collective)."""
    if not have_one_each(world):
        pytest.skip(f"NCCL wants a device for each of the {world.size} ranks")


@contextmanager
def on_one_device(gpu):
    """All ranks have the same device for a while."""
    import cupy

    with cupy.cuda.Device(0), pytest.MonkeyPatch.context() as patch:
        if isinstance(gpu, Real):
            patch.setattr(devices, "bus_id", own_bus_id)
        else:
            patch.setattr(gpu, "bus_id", "0000:17:00.0")
        yield


@contextmanager
def nccl_in_background(is_busy: bool = True):
    """Another thread of this rank takes means."""
    work = Work(list, list, is_busy)
    yield
    work.leave_background()


def forget_means():
    """Take no means of other tests for being in the background."""
    in_background.clear()


def without_thread(patch: pytest.MonkeyPatch):
    """MPI admits no other threads."""
    patch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    patch.setattr(watcher, "_start_thread", watcher._start_thread.__wrapped__)
    patch.setattr(watcher, "_busy", list)  # the thread of earlier tests finds nothing


def count_allgathers(patch: pytest.MonkeyPatch) -> list[int]:
    """How often ranks agree from now on, in a list of one number."""
    count = [0]
    call = Handshake.__call__

    def counting(self: Handshake, *args, **how):
        count[0] += 1
        return call(self, *args, **how)

    patch.setattr(Handshake, "__call__", counting)
    return count


@contextmanager
def small_buffers(nbytes: int = 4096):
    """Arrays pass through page-locked buffers of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "BUFFER_BYTES", nbytes)
        yield


def memory_in_use() -> tuple[int, int]:
    """Bytes of CuPy's arrays, and those that the device has not free."""
    import cupy

    gc.collect()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    free, total = cupy.cuda.runtime.memGetInfo()
    return pool.used_bytes(), total - free


def chunks_of(sizes: Sequence[int], wire: str, chunk_bytes: int) -> list[Chunk]:
    """How gradients of so many elements are cut, all of the same wire dtype."""
    dtypes = (np.dtype(wire),) * len(sizes)
    return plan_chunks(tuple(sizes), dtypes, chunk_bytes)

"""A stand-in for CuPy and its NCCL on NumPy and MPI, as strict as a GPU and able to misbehave.

The device is that of `device_double`. NCCL's operations travel by MPI, and its sums are
rounded at each step and not in rank order.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import contextmanager
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from chainermn_comm.gpu import devices
from tests.support.doubles.device_double import (
    MEMORY_BYTES,
    WIRE_DTYPES,
    Allocation,
    CUDARuntimeError,
    Event,
    Gpu,
    Stream,
    allocate_pinned,
    current_stream,
    run_kernel,
)
from tests.support.doubles.nccl_double import make_nccl


class CudaDevice:
    """The device of that number; all of them have the same memory."""

    def __init__(self, gpu: Gpu, device: int | None = None):
        self.gpu = gpu
        if device is None:
            self.id = gpu.current_device
        else:
            self.id = device

    @property
    def pci_bus_id(self) -> str:
        return self.gpu.bus_id

    def use(self):
        self.gpu.current_device = self.id

    def __enter__(self) -> CudaDevice:
        self.before = self.gpu.current_device
        self.gpu.current_device = self.id
        return self

    def __exit__(self, *_):
        self.gpu.current_device = self.before

    def __eq__(self, other) -> bool:
        return isinstance(other, CudaDevice) and self.id == other.id


class ndarray:
    """An array on the device: a view of an allocation that NumPy doesn't take for an array."""

    def __init__(self, gpu: Gpu, memory: Allocation, host: np.ndarray, device: int):
        self._gpu = gpu
        self._memory = memory
        self._host = host
        self.device = CudaDevice(gpu, device)

    shape, dtype, size, ndim, nbytes, strides, itemsize = (
        property(attrgetter(f"_host.{name}"))
        for name in ("shape", "dtype", "size", "ndim", "nbytes", "strides", "itemsize")
    )
    T = property(lambda self: self._like(self._host.T))
    real = property(lambda self: self._like(self._host.real))

    @property
    def data(self) -> SimpleNamespace:
        owner = SimpleNamespace(ptr=self._memory.bytes.ctypes.data)
        return SimpleNamespace(ptr=self._host.ctypes.data, mem=owner)

    @property
    def flags(self) -> SimpleNamespace:
        host = self._host
        whole = host.size == self._memory.bytes.nbytes // host.itemsize
        c = host.flags.c_contiguous
        f = host.flags.f_contiguous
        return SimpleNamespace(c_contiguous=c, f_contiguous=f, owndata=whole)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        assert self._host.flags.c_contiguous, "MPI takes contiguous memory only"
        about = {"shape": self.shape, "typestr": self.dtype.str, "version": 3}
        return {**about, "data": (self.data.ptr, False)}

    def __array__(self, *_, **__) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def get(self, *, order: str = "C") -> np.ndarray:
        self._gpu.drain(current_stream(self._gpu))
        self._gpu.copied_to_host += self.nbytes
        return np.array(self._host, order=order)

    def __itruediv__(self, other: int) -> ndarray:

        def divide():
            np.divide(self._host, other, out=self._host)

        self._later(divide)
        return self

    def reshape(self, *shape) -> ndarray:
        return self._like(self._host.reshape(*shape))

    def ravel(self) -> ndarray:
        if self._host.flags.c_contiguous:
            return self.reshape(-1)
        return self.copy().reshape(-1)

    def view(self, dtype) -> ndarray:
        return self._like(self._host.view(dtype))

    def __getitem__(self, slices) -> ndarray:
        return self._like(self._host[slices])

    def __setitem__(self, slices, value):
        self._gpu.drain(current_stream(self._gpu))
        if isinstance(value, ndarray):
            value = value._host
        self._host[slices] = value

    def copy(self, order: str = "C") -> ndarray:
        """A copy, which the device makes later, in the order of the current stream."""
        made = Allocation(self._gpu, self.nbytes)
        fortran = self._host.flags.f_contiguous and not self._host.flags.c_contiguous
        kept = "C"
        if order == "K" and fortran:
            kept = "F"
        host = (
            made.bytes[: self.nbytes].view(self.dtype).reshape(self.shape, order=kept)
        )
        found = ndarray(self._gpu, made, host, self.device.id)
        self._later(lambda: np.copyto(host, self._host))
        return found

    def astype(self, dtype) -> ndarray:
        """A copy of that dtype, which the device makes later."""
        found = self._new(self.shape, dtype)

        def copy():
            np.copyto(found._host, self._host)

        self._later(copy)
        return found

    def conj(self) -> ndarray:
        assert self.dtype.kind != "c", "CuPy would copy here"
        return self

    def dot(self, b: ndarray) -> ndarray:
        """The product of two vectors, in memory of the device, where it is summed later."""
        found = self._new((), self.dtype)

        def multiply():
            np.copyto(found._host, self._host.dot(b._host))

        self._later(multiply)
        return found

    def __float__(self) -> float:
        return float(self.get())

    def _new(self, shape: tuple[int, ...], dtype) -> ndarray:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        made = Allocation(self._gpu, nbytes)
        host = made.bytes[:nbytes].view(dtype).reshape(shape)
        return ndarray(self._gpu, made, host, self.device.id)

    def _later(self, work: Callable[[], Any]):
        def run() -> bool:
            work()
            return True

        self._gpu.put(current_stream(self._gpu), run)

    def _like(self, host: np.ndarray) -> ndarray:
        assert host.size == 0 or np.shares_memory(host, self._host), (
            "CuPy would copy here"
        )
        return ndarray(self._gpu, self._memory, host, self.device.id)


def make_cupy(gpu: Gpu) -> tuple[ModuleType, ModuleType, ModuleType]:
    """The modules `cupy`, `cupy.cuda` and `cupy.cuda.nccl` of that device."""
    numbers = itertools.count(0)
    Stream(gpu, next(numbers))  # the null stream

    def empty(shape, dtype=float, order: str = "C") -> ndarray:
        if isinstance(shape, int):
            shape = (shape,)
        dtype = np.dtype(dtype)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory = Allocation(gpu, nbytes)
        flat = memory.bytes[:nbytes].view(dtype)
        return ndarray(
            gpu, memory, flat.reshape(shape, order=order), gpu.current_device
        )

    def asarray(a: np.ndarray) -> ndarray:
        order = "C"
        if a.flags.f_contiguous and not a.flags.c_contiguous:
            order = "F"
        array = empty(a.shape, a.dtype, order)
        gpu.reach("memcpyAsync to device")
        array._host[...] = a
        return array

    def asnumpy(a: ndarray, *, order: str = "C") -> np.ndarray:
        return a.get(order=order)

    def ascontiguousarray(a: ndarray) -> ndarray:
        if a.flags.c_contiguous:
            return a
        return asarray(np.ascontiguousarray(a._host))

    def zeros_like(a: ndarray, *, order: str = "K") -> ndarray:
        return asarray(np.zeros_like(a._host, order=order))

    def get_default_memory_pool() -> SimpleNamespace:
        used = sum(gpu.memory.values())
        return SimpleNamespace(used_bytes=lambda: used, free_all_blocks=lambda: None)

    def memcpy_async(dst: int, src: int, size: int, kind: int, stream: int):
        target = "device"
        if kind == 2:
            target = "host"
        gpu.reach(f"memcpyAsync to {target}")
        if kind == 2:
            gpu.copied_to_host += size

        def copy() -> bool:
            if size:
                there = gpu.bytes_at(dst, size, pinned=kind == 2)
                there[...] = gpu.bytes_at(src, size, pinned=kind == 1)
            return True

        gpu.put(gpu.stream_at(stream), copy)

    def event_query(event: int) -> int:
        return gpu.query(gpu.events[event])

    def device_count() -> int:
        if gpu.count < 0:
            raise RuntimeError(
                "cudaErrorInsufficientDriver: CUDA driver version is insufficient"
            )
        return gpu.count

    def properties(device: int) -> dict[str, Any]:
        assert 0 <= device < gpu.count
        return {
            "name": b"Double",
            "totalGlobalMem": MEMORY_BYTES,
            "major": 7,
            "minor": 0,
        }

    class RawModule:
        def __init__(self, code: str, *, options: tuple[str, ...] = ()):
            assert 'extern "C"' in code

        def get_function(self, name: str) -> Callable[..., None]:
            gpu.reach("compile")

            def launch(grid: tuple[int], block: tuple[int], args: tuple[Any, ...]):
                assert grid[0] > 0, "CUDA refuses a launch without blocks"
                gpu.reach("launchKernel")
                table, count, buffer, size, divisor = args
                gpu.calls.append(name)
                if name.startswith("pack"):
                    letter = name.removeprefix("pack_")
                    itemsize = np.dtype(WIRE_DTYPES[letter]).itemsize
                    gpu.packed.append(int(size) * itemsize)
                rows = table.data.ptr
                wire = buffer.data.ptr

                def work() -> bool:
                    run_kernel(
                        name, gpu.bytes_at, rows, int(count), wire, int(size), divisor
                    )
                    return True

                gpu.put(current_stream(gpu), work)

            return launch

    cupy = ModuleType("cupy")
    cuda = ModuleType("cupy.cuda")
    cuda.nccl = make_nccl(gpu)
    cuda.runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=device_count,
        getDeviceProperties=properties,
        driverGetVersion=lambda: 12090,
        runtimeGetVersion=lambda: 12090,
        memGetInfo=lambda: (MEMORY_BYTES - sum(gpu.memory.values()), MEMORY_BYTES),
        eventQuery=event_query,
        memcpyAsync=memcpy_async,
        memcpyHostToDevice=1,
        memcpyDeviceToHost=2,
        memcpyDeviceToDevice=3,
    )
    cuda.Device = lambda device=None: CudaDevice(gpu, device)

    def make_stream(*, non_blocking=False):
        return Stream(gpu, next(numbers))

    cuda.Stream = make_stream
    cuda.Event = lambda *, disable_timing=False: Event(gpu)

    def elapsed(start_event, end_event):
        return 1e3 * (end_event.time - start_event.time)

    cuda.get_elapsed_time = elapsed
    cuda.get_current_stream = lambda: current_stream(gpu)
    cuda.alloc_pinned_memory = lambda size: allocate_pinned(gpu, size)
    cupy.cuda = cuda
    cupy.ndarray = ndarray
    cupy.RawModule = RawModule
    cupy.empty = empty
    cupy.asarray = asarray
    cupy.asnumpy = asnumpy
    cupy.ascontiguousarray = ascontiguousarray
    cupy.zeros_like = zeros_like
    cupy.get_default_memory_pool = get_default_memory_pool
    return cupy, cuda, cuda.nccl


@contextmanager
def installed():
    """Make `import cupy` give the double; yields its device."""
    gpu = Gpu(MPI.COMM_WORLD.rank)
    with pytest.MonkeyPatch.context() as patch:
        names = "cupy", "cupy.cuda", "cupy.cuda.nccl"
        for name, module in zip(names, make_cupy(gpu), strict=True):
            patch.setitem(sys.modules, name, module)
        devices.kernel.cache_clear()  # another double's
        try:
            yield gpu
        finally:
            gpu.closed = True

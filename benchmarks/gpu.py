"""Times the pack and unpack kernels beside a copy on the device, and the mean of GPU gradients.

    python benchmarks/gpu.py                 one rank
    mpiexec -n 4 python benchmarks/gpu.py    a device for each rank

The kernels must reach 80 % of the copy's bandwidth. A call's time is the median of rounds in
which all contestants take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from mpi4py import MPI
from shapes import resnet50

from chainermn_comm import create_communicator, devices, kernels
from chainermn_comm.chunks import cut

ROUNDS = 20
LIMIT = 0.8
NAMES = ("pure_nccl", "hierarchical", "two_dimensional", "flat")
WIRES = ("float32", "float16")


def main() -> None:
    world = MPI.COMM_WORLD
    why = devices.problem()
    if why is not None:
        raise SystemExit(f"no GPU: {why}")
    import cupy

    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    sizes = [int(np.prod(shape)) for shape in resnet50().values()]
    grads = [devices.to_device(np.ones(size, np.float32)) for size in sizes]
    if world.rank == 0:
        compare_kernels(grads, world.size)
    world.Barrier()
    with_model(world, grads)


def compare_kernels(grads: list[Any], world_size: int) -> None:
    """Print the bandwidth of each kernel, one launch for all of ResNet-50's gradients."""
    nbytes = sum(grad.nbytes for grad in grads)
    source, target = devices.empty(nbytes), devices.empty(nbytes)
    for wire in WIRES:
        wires = (np.dtype(wire),) * len(grads)
        (chunk,) = cut(tuple(grad.size for grad in grads), wires, 1 << 30)
        table, buffer = devices.to_device(kernels.rows([chunk], grads)), devices.empty(chunk.nbytes)
        seconds = take_turns(
            {
                "copy": partial(target.data.copy_from_device_async, source.data, nbytes),
                "pack": partial(kernels.launch, "pack", table, chunk, buffer, world_size),
                "unpack": partial(kernels.launch, "unpack", table, chunk, buffer),
            }
        )
        copy = 2 * nbytes / seconds["copy"]
        print(f"copy on the device: {copy / 1e9:.0f} GB/s read and written")
        for verb in ("pack", "unpack"):
            rate = (nbytes + chunk.nbytes) / seconds[verb]
            verdict = "" if rate >= LIMIT * copy else f", below {LIMIT:.0%}"
            print(f"{verb}, wire {wire}: {rate / 1e9:.0f} GB/s, {rate / copy:.0%}{verdict}")


def with_model(world: MPI.Intracomm, grads: list[Any]) -> None:
    """Print how long the mean of ResNet-50's gradients takes by each name."""
    params = [(f"/p{i:03}", SimpleNamespace(data=g, grad=g)) for i, g in enumerate(grads)]
    model = SimpleNamespace(namedparams=lambda: iter(params))
    for wire in WIRES:
        comms = {name: create_communicator(name, allreduce_grad_dtype=wire) for name in NAMES}
        seconds = take_turns(
            {name: partial(comm.allreduce_grad, model) for name, comm in comms.items()}
        )
        for name, comm in comms.items():
            if world.rank == 0:
                print(f"{name}, {world.size} ranks, wire {wire}: {seconds[name] * 1e3:.2f} ms")
            comm.finalize()


def take_turns(contestants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each; the first round, which makes what is made once, doesn't count."""
    import cupy

    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(ROUNDS + 1):
        for name, run in contestants.items():
            cupy.cuda.Device().synchronize()
            start = time.perf_counter()
            run()
            cupy.cuda.Device().synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: median(times[1:]) for name, times in seconds.items()}


if __name__ == "__main__":
    main()

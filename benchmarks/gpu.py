"""Times the pack and unpack kernels beside a copy on the device, and the mean of GPU gradients.

    python benchmarks/gpu.py                 one rank
    mpiexec -n 4 python benchmarks/gpu.py    a device for each rank

The kernels must reach 80 % of the copy's bandwidth; the device's own clock times them,
by CUDA's events, beside a copy that moves as many bytes. A whole call is timed by the
host's, as its caller waits for it, on the slowest rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import runner
from mpi4py import MPI
from peers import MODELS, RESNET
from report import Limit, Ratio, are_right, environment, headline, save, show
from runner import Case, Row, measure

from chainermn_comm import create_communicator
from chainermn_comm.gpu import devices, kernels
from chainermn_comm.gpu.nccl import NcclCommunicator
from chainermn_comm.layout.chunks import SMALL_FRACTION, plan_chunks

COPY = "copy"
RAW = "NCCL's allReduce of one buffer"
NAMES = ("pure_nccl", "hierarchical", "two_dimensional", "flat", "naive")
KERNELS = ("pack", "unpack")
LIMITS = [Limit(kernel, COPY, 0.8, faster=True) for kernel in KERNELS]
OF_COPY = (Ratio("of a copy's bandwidth", COPY, inverse=True),)
PEERS = (Ratio("x NCCL", RAW),)
WIRES = ("float32", "float16")
# Launches in a row: the device then has the next one before it is done with the one
# before.
LAUNCHES = 10


def arguments() -> argparse.Namespace:
    parser = runner.parser(__doc__, rounds=20, ranks=(1,), model=RESNET, models=MODELS)
    return parser.parse_args()


def run(args: argparse.Namespace, comm: MPI.Intracomm) -> bool:
    """Measure on a device for each rank, and report (collective)."""
    why = devices.unavailable_reason()
    if why is not None:
        raise SystemExit(f"no GPU: {why}")
    import cupy

    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    found = environment(comm, args.rounds)
    shapes = MODELS[args.model].values()
    # CUDA divides zeros more slowly than other numbers.
    grads = [cupy.asarray(np.ones(shape, np.float32)) for shape in shapes]
    size = f"{args.model}, {comm.size} ranks"
    if comm.rank == 0:
        headline(found)
        for wire in WIRES:
            rows, nbytes = time_kernels(grads, wire, comm.size, args.rounds)
            title = f"kernels, wire {wire}: {nbytes / 1e6:.3g} MB read and written"
            show(title, rows, OF_COPY, LIMITS)
            found[f"kernels, {wire}"] = rows
    comm.Barrier()
    right = True
    for wire in WIRES:
        rows = time_means(comm, grads, wire, args.rounds)
        right &= are_right(rows)
        if comm.rank == 0:
            show(f"{size}, wire {wire}", rows, PEERS)
            found[wire] = rows
    if comm.rank == 0:
        save(found, args.json)
    return right


def time_kernels(
    grads: Sequence[Any], wire: str, world_size: int, rounds: int
) -> tuple[list[Row], int]:
    """Time one launch for all gradients beside a copy of as many bytes; return these, too."""
    import cupy

    nbytes = sum(grad.nbytes for grad in grads)
    wires = (np.dtype(wire),) * len(grads)
    sizes = tuple(grad.size for grad in grads)
    (chunk,) = plan_chunks(sizes, wires, SMALL_FRACTION * nbytes)
    table = cupy.asarray(kernels.segment_table([chunk], grads))
    buffer = devices.empty(chunk.nbytes)
    moved = nbytes + chunk.nbytes
    source = devices.empty(moved // 2)
    target = devices.empty(moved // 2)
    of_chunk = (chunk, table, buffer)
    launches = {
        COPY: partial(copy_on_device, source, target),
        "pack": partial(kernels.launch, "pack", *of_chunk, world_size),
        "unpack": partial(kernels.launch, "unpack", *of_chunk),
    }
    ms: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(1 + rounds):
        for name, launch in launches.items():
            ms[name].append(device_ms(launch))
    rows: list[Row] = []
    for name, found in ms.items():  # the first compiled
        rows.append({"name": name, "ms": found[1:], "right": True})
    return rows, moved


def copy_on_device(source: Any, target: Any) -> None:
    """Copy equal numbers of bytes on the current stream; returns at once."""
    import cupy

    runtime = cupy.cuda.runtime
    there = devices.address(target)
    here = devices.address(source)
    stream = devices.current_stream()
    kind = runtime.memcpyDeviceToDevice
    runtime.memcpyAsync(there, here, source.nbytes, kind, stream.ptr)


def device_ms(launch: Callable[[], object]) -> float:
    """Return the milliseconds that a launch takes the device, on the current stream."""
    import cupy

    stream = devices.current_stream()
    start = cupy.cuda.Event()
    stop = cupy.cuda.Event()
    launch()  # keeps the device busy until the host has put the others in its queue
    start.record(stream)
    for _ in range(LAUNCHES):
        launch()
    stop.record(stream)
    wait_for(stop)
    return float(cupy.cuda.get_elapsed_time(start, stop)) / LAUNCHES


def wait_for(event: Any) -> None:
    """Return when all that was given to the event's stream is done."""
    while not devices.is_done(event):
        pass


def time_means(
    comm: MPI.Intracomm, grads: Sequence[Any], wire: str, rounds: int
) -> list[Row]:
    """Time the mean of gradients by each name and peer (collective)."""
    params = []
    for number, grad in enumerate(grads):
        params.append((f"/p{number:03}", SimpleNamespace(data=grad, grad=grad)))
    model = SimpleNamespace(namedparams=lambda: iter(params))

    def case(name: str, call: Callable[[], object]) -> Case:
        def call_and_wait() -> None:
            call()
            wait_for(devices.recorded_event())

        def is_mean() -> bool:
            for grad in grads:
                grad[...] = float(comm.rank + 1)
            call_and_wait()
            mean = (comm.size + 1) / 2
            return all(np.allclose(grad.get(), mean, rtol=4e-3) for grad in grads)

        if name == RAW:
            is_mean = runner.always
        return Case(name, call_and_wait, is_right=is_mean)

    communicators = [create_communicator(name, comm, wire) for name in NAMES]
    cases = []
    for name, each in zip(NAMES, communicators, strict=True):
        cases.append(case(name, partial(each.allreduce_grad, model)))
    closing = [each.finalize for each in communicators]
    if comm.size > 1:
        nccl = NcclCommunicator(comm)
        closing.append(nccl.close)
        nbytes = sum(grad.size for grad in grads) * np.dtype(wire).itemsize
        flat = devices.empty(nbytes).view(wire)
        cases.append(case(RAW, partial(nccl.sum_in_place, flat)))
    rows = measure(comm, cases, rounds)
    for close in closing:
        close()
    return rows


if __name__ == "__main__":
    sys.exit(runner.main(arguments(), run))

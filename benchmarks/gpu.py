"""Times the pack and unpack kernels beside a copy on the device, and the mean of GPU gradients.

    python benchmarks/gpu.py                 one rank
    mpiexec -n 4 python benchmarks/gpu.py    a device for each rank

The kernels must reach 80 % of the copy's bandwidth; the device's own clock times them,
by CUDA's events. A whole call is timed by the host's, as its caller waits for it, on
the slowest rank. All cases take turns, round after round, and ratios are taken round by
round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import peers
from in_turn import Timed, time_in_turn
from limits import AT_LEAST, judge
from mpi4py import MPI
from report import limits_table, number
from rich.console import Console
from rich.table import Table
from shapes import Shapes, resnet50
from tables import make_table

from chainermn_comm import create_communicator
from chainermn_comm.gpu import devices, kernels
from chainermn_comm.gpu.nccl import NcclCommunicator
from chainermn_comm.layout.chunks import SMALL_FRACTION, plan_chunks

ROUNDS = 20
# Launches in a row: the device then has the next one before it is done with the one
# before.
LAUNCHES = 10
OF_A_COPY = 0.8
NAMES = ("pure_nccl", "hierarchical", "two_dimensional", "flat", "naive")
WIRE_DTYPES = ("float32", "float16")
RAW, BUNDLED = "NCCL's allReduce of one buffer", "bundled pure_nccl"

Cases = dict[str, Callable[[], Any]]


def main() -> None:
    world = MPI.COMM_WORLD
    why = devices.unavailable_reason()
    if why is not None:
        raise SystemExit(f"no GPU: {why}")
    import cupy

    cupy.cuda.Device(world.rank % cupy.cuda.runtime.getDeviceCount()).use()
    run(world, resnet50(), Console())


def run(world: MPI.Intracomm, shapes: Shapes, console: Console) -> list[dict[str, Any]]:
    """Measure on the current devices, and have rank 0 print the tables (collective).

    Returns:
        What `limits.judge` said, on rank 0.
    """
    import cupy

    # CUDA divides zeros more slowly than other numbers.
    draw = np.random.default_rng(world.rank)
    grads = [cupy.asarray(draw.standard_normal(s, np.float32)) for s in shapes.values()]
    rows: list[dict[str, Any]] = []
    if world.rank == 0:
        rates = {wire: kernel_rates(grads, wire, world.size) for wire in WIRE_DTYPES}
        rows = [row for wire, found in rates.items() for row in limits(wire, found)]
        console.print(_kernels_table(rates))
        console.print(limits_table(rows))
    world.Barrier()
    for wire in WIRE_DTYPES:
        ms, problems = whole_calls(world, grads, wire)
        if world.rank == 0:
            nbytes = sum(grad.nbytes for grad in grads)
            console.print(
                _calls_table(f"{nbytes / 1e6:.3g} MB, {world.size} ranks, {wire}", ms)
            )
            console.print(*problems, sep="\n")
    return rows


def kernel_rates(
    grads: Sequence[Any], wire: str, world_size: int
) -> dict[str, np.ndarray]:
    """GB/s read and written in each round: a copy, and one launch for all gradients."""
    import cupy

    nbytes = sum(grad.nbytes for grad in grads)
    source, target = devices.empty(nbytes), devices.empty(nbytes)
    wires = (np.dtype(wire),) * len(grads)
    (chunk,) = plan_chunks(
        tuple(grad.size for grad in grads), wires, SMALL_FRACTION * nbytes
    )
    table, buffer = (
        cupy.asarray(kernels.segment_table([chunk], grads)),
        devices.empty(chunk.nbytes),
    )
    of_chunk = chunk, table, buffer
    ms = on_device(
        {
            "copy": partial(copy_on_device, source, target),
            "pack": partial(kernels.launch, "pack", *of_chunk, world_size),
            "unpack": partial(kernels.launch, "unpack", *of_chunk),
        }
    )
    moved = {
        "copy": 2 * nbytes,
        "pack": nbytes + chunk.nbytes,
        "unpack": nbytes + chunk.nbytes,
    }
    return {name: moved[name] / ms[name] / 1e6 for name in ms}


def copy_on_device(source: Any, target: Any) -> None:
    """Copy equal numbers of bytes on the current stream; returns at once."""
    import cupy

    runtime, stream = cupy.cuda.runtime, devices.current_stream()
    there, here = devices.address(target), devices.address(source)
    runtime.memcpyAsync(
        there, here, source.nbytes, runtime.memcpyDeviceToDevice, stream.ptr
    )


def on_device(cases: Cases) -> dict[str, np.ndarray]:
    """Milliseconds that a launch takes the device, in each round; all go to the current stream."""
    import cupy

    ms = {name: np.zeros(ROUNDS) for name in cases}
    stream = devices.current_stream()
    for turn in range(-1, ROUNDS):  # the first, which compiles, doesn't count
        for name, launch in cases.items():
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            # Keeps the device busy until the host has put the others in its queue.
            launch()
            start.record(stream)
            for _ in range(LAUNCHES):
                launch()
            stop.record(stream)
            while not devices.is_done(stop):
                pass
            if turn >= 0:
                ms[name][turn] = cupy.cuda.get_elapsed_time(start, stop) / LAUNCHES
    return ms


def limits(wire: str, rates: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """What the kernels must reach, and what they did."""
    return [
        judge(
            f"{kernel}, wire {wire}: part of a copy's bandwidth",
            AT_LEAST,
            OF_A_COPY,
            rates[kernel] / rates["copy"],
        )
        for kernel in ("pack", "unpack")
    ]


def whole_calls(
    world: MPI.Intracomm, grads: Sequence[Any], wire: str
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Milliseconds of the mean of gradients by each name and peer in each round, and what is wrong.

    Collective; a round's are those of its slowest rank.
    """
    params = [
        (f"/p{i:03}", SimpleNamespace(data=g, grad=g)) for i, g in enumerate(grads)
    ]
    model = SimpleNamespace(namedparams=lambda: iter(params))
    comms = {
        name: create_communicator(name, allreduce_grad_dtype=wire) for name in NAMES
    }
    calls: Cases = {name: partial(c.allreduce_grad, model) for name, c in comms.items()}
    problems = [
        f"{name}: WRONG"
        for name, call in calls.items()
        if not is_mean(world, grads, call)
    ]
    nccl = NcclCommunicator(world) if world.size > 1 else None
    if nccl is not None:
        size = sum(grad.size for grad in grads)
        flat = devices.empty(size * np.dtype(wire).itemsize).view(wire)
        calls[RAW] = partial(nccl.sum_in_place, flat)
        call, problem = bundled(world, grads, wire)
        calls |= {BUNDLED: call} if call else {}
        problems += [problem] * bool(problem)
    cases = [Timed(partial(call_and_wait, call)) for call in calls.values()]
    seconds = time_in_turn(world, cases, ROUNDS, warm_up=1)[:, :, 0]
    if nccl is not None:
        nccl.close()
    for comm in comms.values():
        comm.finalize()
    return dict(zip(calls, 1e3 * seconds.T, strict=True)), problems


def is_mean(
    world: MPI.Intracomm, grads: Sequence[Any], call: Callable[[], Any]
) -> bool:
    """Whether a call gives the mean of the ranks' numbers (collective)."""
    for grad in grads:
        grad[...] = float(world.rank)
    call()
    near = all(
        np.allclose(grad.get(), (world.size - 1) / 2, rtol=4e-3) for grad in grads
    )
    return bool(world.allreduce(near, MPI.LAND))


def call_and_wait(call: Callable[[], Any]) -> None:
    """Return when all that was given to the current stream is done."""
    call()
    event = devices.recorded_event()
    while not devices.is_done(event):
        pass


def bundled(
    world: MPI.Intracomm, grads: Sequence[Any], wire: str
) -> tuple[Callable[[], Any] | None, str]:
    """The mean by the ChainerMN that Chainer 7 bundles, or why there is none (collective)."""
    call, problem = None, ""
    try:
        import chainer

        model = chainer.Link()
        with model.init_scope():
            for i, grad in enumerate(grads):
                param = chainer.Parameter(grad)
                setattr(model, f"p{i:03}", param)
                param.grad = grad
        comm = peers.bundled(world, "pure_nccl", allreduce_grad_dtype=wire)
        call = partial(comm.multi_node_mean_grad, model)
    except Exception as error:
        problem = f"{BUNDLED}: not measured: {type(error).__name__}: {error}"
    problems = [found for found in world.allgather(problem) if found]
    return (None, problems[0]) if problems else (call, "")


def _kernels_table(rates: dict[str, dict[str, np.ndarray]]) -> Table:
    rows = [
        (f"{name}, wire {wire}", f"{np.median(rate):.0f}")
        for wire, found in rates.items()
        for name, rate in found.items()
    ]
    return make_table("GB/s read and written", ("median",), rows)


def _calls_table(title: str, ms: dict[str, np.ndarray]) -> Table:
    table = make_table("milliseconds", ("median", "x NCCL", "x bundled"), title=title)
    for name, times in ms.items():
        ratios = [
            number(float(np.median(times / ms[peer]))) if peer in ms else ""
            for peer in (RAW, BUNDLED)
        ]
        table.add_row(name, number(float(np.median(times))), *ratios)
    return table


if __name__ == "__main__":
    main()

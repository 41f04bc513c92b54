"""Runs a benchmark on all ranks: makes communicators, checks them, and times them by size."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from chainermn_comm import CommunicatorBase, create_communicator
from chainermn_tools.bench.memory import available_bytes
from chainermn_tools.bench.operations import BASELINES, MEAN_GRAD, OPERATIONS, Operation
from chainermn_tools.bench.timing import Times, is_correct, time_all
from chainermn_tools.formatting import format_bytes
from chainermn_tools.jobs import available_cores

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

# Raised when a key of the report changes its name or its meaning.
SCHEMA = 3
FLOAT_BYTES = 4
# Arrays as long as `bytes` that a rank holds at most: its own, one for the baselines'
# results, what an operation returns, and a copy that MPI or an operation makes.
ARRAYS = 4
# Bytes with which every operation of every communicator is checked before anything is
# timed.
CHECK_BYTES = 64 << 10
# Sizes up to this get equal shares of the time.
EVEN_BYTES = 4 << 20


@dataclass(frozen=True)
class Case:
    """One operation of one communicator, which is measured."""

    communicator: str | None  # its name; None for a baseline
    operation: str  # its name
    kind: Operation
    comm: CommunicatorBase  # that it is called on


def measure(
    world: MPI.Intracomm,
    names: Sequence[str],  # of the communicators
    sizes: Sequence[int],  # in bytes, growing
    seconds: float,  # for everything; sizes for which no time is left are skipped
    log: Callable[[str], None],  # called on rank 0 with what is being done
) -> dict[str, Any]:
    """Check and time communicators (collective over ``world``).

    Return the report that docs/bench.md describes, the same on all ranks.
    """
    from mpi4py import MPI

    start = time.monotonic()
    hosts = world.allgather(MPI.Get_processor_name())
    comms, skipped = _communicators(world, names)
    nodes = next(iter(comms.values())).inter_size if comms else None
    if world.rank == 0:
        log(f"checking {', '.join(comms)}")
    checks = _check(world, _cases(comms, world.size))
    results, too_large = _time_sizes(world, comms, sizes, start + seconds, log)
    for comm in comms.values():
        comm.finalize()
    return {
        "schema": SCHEMA,
        "ranks": world.size,
        "nodes": nodes,
        "hosts": hosts,
        "cores": available_cores()["usable"],
        "mpi": " ".join(MPI.Get_library_version().split("\n")[0].strip("\0").split()),
        "python": sys.version.split()[0],
        "packages": {
            name: version(name) for name in ("chainermn-comm", "mpi4py", "numpy")
        },
        "seconds": round(world.bcast(time.monotonic() - start), 3),
        "correct": all(row["correct"] for row in [*checks, *results]) and bool(results),
        "checks": checks,
        "results": results,
        "skipped": [*skipped, *too_large],
    }


def _time_sizes(
    world: MPI.Intracomm,
    comms: dict[str, CommunicatorBase],
    sizes: Sequence[int],
    end: float,
    log: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of the sizes that were timed, and why the others weren't."""
    # The mean of gradients of each communicator, and the other operations of the first.
    cases = sorted(
        _cases(comms, world.size), key=lambda one: one.operation != MEAN_GRAD
    )
    first = cases[0].comm if cases else None
    cases = [one for one in cases if one.operation == MEAN_GRAD or one.comm is first]
    cases += [
        Case(None, name, kind, cases[0].comm)
        for name, kind in BASELINES.items()
        if cases
    ]
    results: list[dict[str, Any]] = []
    least = 0.0  # seconds that the last size took at least
    for index, size in enumerate(sizes):
        nbytes = max(1, size // FLOAT_BYTES // world.size) * world.size * FLOAT_BYTES
        left = world.bcast(end - time.monotonic())
        arrays = _allocate(world, nbytes, left, least, comms)
        if isinstance(arrays, str):
            return results, [
                {"bytes": each, "reason": arrays} for each in sizes[index:]
            ]
        if world.rank == 0:
            log(f"{format_bytes(size)}, {len(cases)} ways, {left:.0f} s left")
        share = left * _weight(size) / sum(map(_weight, sizes[index:]))
        invocations = [one.kind.make_invocation(one.comm, *arrays) for one in cases]
        times, least = time_all(world, invocations, share)
        del arrays, invocations  # before larger ones are allocated
        pairs = list(zip(cases, times, strict=True))
        results += [_row(one, its, size=size, bytes=nbytes) for one, its in pairs]
        cases = [one for one, its in pairs if its.correct]  # others aren't tried again
    return results, []


def _communicators(
    world: MPI.Intracomm, names: Sequence[str]
) -> tuple[dict[str, CommunicatorBase], list[dict[str, Any]]]:
    """Return the communicators that can be made here, and why the others can't."""
    comms: dict[str, CommunicatorBase] = {}
    skipped = []
    for name in names:
        try:
            comms[name] = create_communicator(name, world)
        except ValueError as error:  # on all ranks
            reason = str(error).removeprefix(f"rank {world.rank}: ")
            skipped.append({"communicator": name, "reason": reason})
    return comms, skipped


def _cases(comms: dict[str, CommunicatorBase], ranks: int) -> list[Case]:
    return [
        Case(name, operation, kind, comm)
        for name, comm in comms.items()
        for operation, kind in OPERATIONS.items()
        if ranks >= kind.min_ranks
    ]


def _check(world: MPI.Intracomm, cases: Sequence[Case]) -> list[dict[str, Any]]:
    count = CHECK_BYTES // FLOAT_BYTES // world.size * world.size or world.size
    arrays = np.empty(count, np.float32), np.empty(count, np.float32)
    invocations = ((one, one.kind.make_invocation(one.comm, *arrays)) for one in cases)
    return [_row(one, Times(*is_correct(world, call))) for one, call in invocations]


def _allocate(
    world: MPI.Intracomm,
    nbytes: int,
    left: float,
    least: float,
    comms: dict[str, CommunicatorBase],
) -> list[np.ndarray] | str:
    """Return two arrays of ``nbytes`` bytes, or why none is tried, the same on all ranks."""
    if not comms:
        return "no communicator could be made"
    ranks = next(iter(comms.values())).intra_size
    rooms = world.allgather(available_bytes(ranks))
    rank = int(np.argmin(rooms))
    if ARRAYS * nbytes > rooms[rank]:
        return (
            f"{ARRAYS} arrays of {format_bytes(nbytes)} don't fit into the "
            f"{format_bytes(rooms[rank])} of memory that rank {rank} may take"
        )
    # Four times the bytes take four times the time, when they take any that counts.
    if left <= 4 * least:
        return (
            f"it takes some {4 * least:.1f} s, and {max(left, 0):.1f} s were left; "
            "give more with --seconds"
        )
    try:
        arrays = [np.empty(nbytes // FLOAT_BYTES, np.float32) for _ in range(2)]
    except MemoryError:
        arrays = []
    return (
        arrays if all(world.allgather(bool(arrays))) else "a rank has no memory for it"
    )


def _weight(size: int) -> float:
    """Return how much of the time a size gets; large ones need more."""
    return max(1.0, math.sqrt(size / EVEN_BYTES))


def _row(case: Case, times: Times, **sizes: int) -> dict[str, Any]:
    """Return what was found of a case; ``sizes`` are the ``size`` and ``bytes`` that it had."""
    row: dict[str, Any] = {
        "communicator": case.communicator,
        "operation": case.operation,
    }
    row |= {**sizes, "correct": times.correct}
    if times.problem is not None:
        row["problem"] = times.problem
    if times.seconds:
        seconds = [each / case.kind.transfers_per_call for each in times.seconds]
        algbw = sizes["bytes"] / median(seconds) / 1e9
        row |= {
            "seconds": median(seconds),
            "fastest_seconds": min(seconds),
            "slowest_seconds": max(seconds),
            "calls": times.calls,
            "algbw": algbw,
            "busbw": algbw * case.kind.bus_factor(case.comm.size),
        }
    return row

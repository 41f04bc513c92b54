"""Runs a benchmark on all ranks: makes communicators, and checks and times them by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from chainermn_comm import CommunicatorBase, create_communicator
from chainermn_comm.config import NAMES
from chainermn_tools.bench.operations import BASELINES, MEAN_GRAD, OPERATIONS, Operation
from chainermn_tools.bench.timing import time_all
from chainermn_tools.formatting import format_bytes, format_count

if TYPE_CHECKING:  # importing it starts MPI
    from mpi4py import MPI

FLOAT_BYTES = 4
# `dummy` moves nothing, and `pure_nccl` moves no arrays in host memory, as all arrays
# here are.
NOT_MEASURED = ("dummy", "pure_nccl")
# The time for the rounds of each size.
SECONDS = 3.0


@dataclass(frozen=True)
class Case:
    """One operation of one communicator, which is measured."""

    title: str
    operation: Operation
    comm: CommunicatorBase  # on which it is called


@dataclass
class Report:
    """What was found, the same on all ranks."""

    where: str  # the ranks, the nodes and their MPI, in a line
    sizes: Sequence[int]  # in bytes
    # The median time of a call in seconds, by title and size.
    times: dict[str, dict[int, float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # wrong values and errors
    skipped: list[str] = field(default_factory=list)  # why a communicator can't be made

    @property
    def correct(self) -> bool:
        """Whether something was measured, and all values were right."""
        return bool(self.times) and not self.problems


def measure(world: MPI.Intracomm, names: Sequence[str], sizes: Sequence[int]) -> Report:
    """Check and time communicators, all without names, by bytes (collective over ``world``)."""
    report = Report(where="", sizes=sizes)
    comms = _communicators(world, names, report)
    report.where = _where(world)
    cases = _cases(comms)
    for size in sizes:
        count = max(1, size // FLOAT_BYTES // world.size) * world.size
        sent = np.empty(count, np.float32)
        result = np.empty(count, np.float32)
        invocations = [
            case.operation.make_invocation(case.comm, sent, result) for case in cases
        ]
        found = time_all(world, invocations, SECONDS)
        right = []
        for case, times in zip(cases, found, strict=True):
            if times.correct:
                report.times.setdefault(case.title, {})[size] = median(times.seconds)
                right.append(case)
            else:
                what = times.problem or "wrong values"
                report.problems.append(f"{case.title}, {format_bytes(size)}: {what}")
        cases = right  # the other communicators aren't tried again
    for comm in comms.values():
        comm.finalize()
    return report


def _communicators(
    world: MPI.Intracomm, names: Sequence[str], report: Report
) -> dict[str, CommunicatorBase]:
    """Return the communicators that can be made here; the report gets why others can't."""
    comms: dict[str, CommunicatorBase] = {}
    for name in names or NAMES:
        if name in NOT_MEASURED:
            report.skipped.append(f"{name}: it exchanges no arrays in host memory")
            continue
        try:
            comms[name] = create_communicator(name, world)
        except ValueError as error:  # on all ranks
            reason = str(error).removeprefix(f"rank {world.rank}: ")
            report.skipped.append(f"{name}: {reason}")
    return comms


def _where(world: MPI.Intracomm) -> str:
    from mpi4py import MPI

    hosts = sorted(set(world.allgather(MPI.Get_processor_name())))
    ranks = format_count(world.size, "rank")
    library = MPI.Get_library_version().split("\n")[0].strip("\0")
    where = f"{format_count(len(hosts), 'node')} ({', '.join(hosts)})"
    return f"{ranks} on {where}, {' '.join(library.split())}"


def _cases(comms: Mapping[str, CommunicatorBase]) -> list[Case]:
    """Return each communicator's mean of gradients, and once the other operations."""
    mean = OPERATIONS[MEAN_GRAD]
    cases = [Case(f"{mean.title}, {name}", mean, comm) for name, comm in comms.items()]
    for comm in list(comms.values())[:1]:
        cases += [
            Case(operation.title, operation, comm)
            for name, operation in OPERATIONS.items()
            if name != MEAN_GRAD and comm.size >= operation.min_ranks
        ]
        cases += [Case(one.title, one, comm) for one in BASELINES.values()]
    return cases

"""What may go wrong on a rank, and when; and a rank's plan of it, inside of the job."""

from __future__ import annotations

import ctypes
import random
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tests.support.jobs.failing import ENDS, MODULES
from tests.support.jobs.processes import soon

T = TypeVar("T")

# Left free when memory runs out: less than anybody's next array.
BLOCK_BYTES = 1 << 20
MEMORY_BYTES = 64 << 20  # until then


def run_out_of_memory():
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(
        resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1])
    )
    # The traceback will hold it, so that all that follows has no memory either.
    held = []
    while True:
        held.append(bytearray(BLOCK_BYTES))


def loop_in_python():
    while True:
        pass


def hold_in_c():
    while True:  # a signal ends the call, which holds the GIL
        ctypes.PyDLL(None).sleep(1000)


@dataclass(frozen=True)
class Kind:
    """A fault: by what the job does after it, what the rank does, and what is said of it then."""

    group: str
    statement: str = ""
    said: str = ""


def ending(name: str) -> Kind:
    """An end that the job reports itself, of the table of all tests."""
    return Kind("end", ENDS[name].statement, ENDS[name].said)


KINDS = {
    "exception": ending("exception"),
    "sys.exit": ending("sys.exit"),
    "os._exit": ending("os._exit"),
    "SIGTERM": Kind("warning", ENDS["SIGTERM"].statement),
    "SIGKILL": Kind("signal", ENDS["SIGKILL"].statement),
    "SIGSEGV": Kind("signal", ENDS["SIGSEGV"].statement),
    "memory": Kind(
        "end",
        "run_out_of_memory()",
        "ChainerMN: rank {rank} of {ranks}: uncaught MemoryError",
    ),
    "SIGSTOP": Kind("stall", "os.kill(os.getpid(), signal.SIGSTOP)", "is stopped"),
    "loop": Kind("stall", "loop_in_python()", "in loop_in_python\n"),
    "held": Kind("stall", "hold_in_c()", "in hold_in_c\n"),
    # The rank does something else than the others do, instead of failing by itself.
    "skip": Kind("deviation", said="has ended and waits in MPI_Finalize"),
    "other": Kind("deviation"),
    "shape": Kind("deviation"),
    "disk": Kind("disk"),
    "link": Kind("link"),
}


@dataclass(frozen=True)
class Moment:
    """When a fault comes."""

    function: str  # of the job, as a traceback shows it
    # The others wait in one of them, or ranks disagree in it.
    operations: tuple[str, ...]
    iterations: tuple[int, ...] = (0,)  # the job saves at every third


MOMENTS = {
    "scatter_dataset": Moment("scatter", ("scatter_dataset",)),
    "bcast_data": Moment("share", ("bcast_data",)),
    "first update": Moment("first_mean", ("update",)),
    "collective": Moment("agree", ("allreduce",), (1, 4, 8)),
    "user code": Moment("forward", ("update",), (2, 5, 9)),
    "checkpoint": Moment("save", ("checkpoint",), (3, 6, 9)),
    "writing": Moment("write", ("checkpoint",), (3, 6, 9)),
    "finalize": Moment("main", ("finalize",)),
}
# Before any checkpoint can have been committed.
EARLY = ("scatter_dataset", "bcast_data", "first update")
STOP = 12  # iterations of a job


def is_possible(kind: str, moment: str) -> bool:
    """Whether the fault is one there, and not what the rank would do anyway."""
    if moment == "finalize":
        # What comes after `finalize` is the same call, and nothing is written any more.
        return kind not in ("shape", "disk")
    # Elsewhere the rank calls nothing, or nothing that has a shape.
    return KINDS[kind].group != "deviation" or moment not in ("user code", "writing")


# Groups whose faults may come at a random time. A handler that loops, inside of the
# call that all are in, isn't told from a slow network.
AT_RANDOM = ("end", "warning", "signal", "link")
COMMUNICATORS = ("naive", "flat", "hierarchical", "two_dimensional")


@dataclass(frozen=True)
class Case:
    """A job and its fault."""

    kind: str
    moment: str | None  # None for a random time
    iteration: int = 0  # where the moment comes again and again
    victim: int = 1
    ranks: int = 2
    communicator: str = "flat"
    launcher: str = "mpiexec"  # or "launch"
    hosts: int = 1
    background: bool = False  # whether checkpoints are written in the background
    overlap: bool = False  # whether gradients travel while backward computes
    after: float = 0.0  # the share of the job's length, where the time is random
    seed: int = -1

    @property
    def group(self) -> str:
        return KINDS[self.kind].group


# Each fault and each moment once, and a failure while MPI's shared memory has a name.
EACH = [
    Case("exception", "scatter_dataset", communicator="hierarchical"),
    Case("sys.exit", "bcast_data", launcher="launch"),
    Case("os._exit", "first update", communicator="naive"),
    Case("SIGTERM", "collective", 4, communicator="two_dimensional"),
    Case("SIGKILL", "writing", 6, communicator="hierarchical"),
    Case("SIGSEGV", "user code", 5),
    Case("memory", "checkpoint", 6, 0, communicator="naive", launcher="launch"),
    Case("SIGSTOP", "finalize"),
    Case("loop", "user code", 2, communicator="hierarchical"),
    Case("held", "collective", 4, 0, communicator="naive", launcher="launch"),
    Case(
        "skip",
        "first update",
        communicator="two_dimensional",
        launcher="launch",
        overlap=True,
    ),
    Case("skip", "checkpoint", 3, ranks=3),
    Case("other", "first update", communicator="hierarchical"),
    Case("shape", "collective", 4, 0, communicator="two_dimensional"),
    Case("disk", "writing", 6),
    Case("link", "collective", 4, launcher="launch", hosts=2),
]


def draw(seed: int) -> Case:
    """The case of a seed."""
    choose = random.Random(seed)
    kind = choose.choice(list(KINDS))
    moments = [each for each in MOMENTS if is_possible(kind, each)]
    if KINDS[kind].group in AT_RANDOM or kind == "SIGSTOP":
        moments += [None] * len(moments)
    moment = choose.choice(moments)
    ranks = choose.choice((2, 2, 3, 4))
    iteration = 0
    if moment:
        iteration = choose.choice(MOMENTS[moment].iterations)
    case = Case(
        kind,
        moment,
        iteration,
        victim=choose.randrange(ranks),
        ranks=ranks,
        communicator=choose.choice(COMMUNICATORS),
        launcher=choose.choice(("mpiexec", "launch")),
        hosts=choose.choice((1, 1, 2)),
        background=choose.random() < 0.3,
        overlap=choose.random() < 0.5,
        after=choose.random(),
        seed=seed,
    )
    if kind == "link":
        case = replace(case, launcher="launch", hosts=2)
    if kind == "disk":
        case = replace(case, hosts=1)
    if kind == "disk" or moment == "writing":
        # In the background the error would wait for the next save.
        case = replace(case, background=False)
    return case


class Plan:
    """One fault on one rank, once."""

    updater: Any = None  # of the job, which tells the iteration

    def __init__(
        self, fault: dict[str, Any] | None, rank: int, status: Path, disk: Path
    ):
        """Plan it, unless it is another rank's.

        The fault has what a `Case` has; its `after` is in seconds. In `status` the
        runner is told of it; `disk` may be to run full.
        """
        self._status = status
        self._disk = disk
        self._fault = None
        if fault is not None and fault["victim"] == rank:
            self._fault = fault

    def start(self):
        """From now on it can happen at its time, whatever goes on then."""
        if self._fault is not None and self._fault["moment"] is None:
            kind = self._fault["kind"]
            signal.signal(signal.SIGALRM, lambda *_: self._strike(kind))
            # 0 would mean never.
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, self._fault["after"]))

    def stop(self):
        """It was too late: Python is about to give signals back their own meaning."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def at(self, moment: str) -> str:
        """If this is its moment, have it happen, or give its kind for the caller to deviate."""
        fault = self._fault
        if fault is None or fault["moment"] != moment:
            return ""
        if fault["iteration"] and fault["iteration"] != self.updater.iteration:
            return ""
        self._fault = None
        self._strike(fault["kind"])
        return fault["kind"]

    def collective(
        self,
        moment: str,
        comm,
        call: Callable[[Any], T],
        right=None,
        other=None,
    ) -> T | None:
        """A collective call, which the fault may prevent or give the other argument."""
        how = self.at(moment)
        if how == "skip":
            return None
        if how == "other":
            comm.alltoall_obj([None] * comm.size)
        return call(other if how == "shape" else right)

    def _strike(self, kind: str):
        (self._status / "fault").write_text(f"{time.time()}")
        if kind == "disk":
            fill(self._disk)
        elif kind == "link":
            assert soon((self._status / "cut").exists), "nobody has cut the link"
        else:
            exec(MODULES + KINDS[kind].statement)


def fill(disk: Path):
    """Write until there is no room."""
    with (
        open(disk / "filler", "wb", buffering=0) as file,
        suppress(OSError),
    ):
        while True:
            file.write(bytes(4096))

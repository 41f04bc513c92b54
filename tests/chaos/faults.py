"""What may go wrong on a rank, and when; and a rank's plan of it, inside of the job."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# Left free when memory runs out: less than anybody's next array.
BLOCK_BYTES = 1 << 20
MEMORY_BYTES = 64 << 20  # until then
LINK_SECONDS = 20.0  # for the runner to cut the link


def raise_exception() -> None:
    raise RuntimeError("planted")


def run_out_of_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(
        resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1])
    )
    # The traceback will hold it, so that all that follows has no memory either.
    held = []
    while True:
        held.append(bytearray(BLOCK_BYTES))


def loop_in_python() -> None:
    while True:
        pass


def hold_in_c() -> None:
    while True:  # a signal ends the call, which holds the GIL
        ctypes.PyDLL(None).sleep(1000)


@dataclass(frozen=True)
class Kind:
    """A fault: by what the job does after it, what the rank does, and what is said of it then."""

    group: str
    strike: Callable[[], object] | None = None
    said: str = ""


KINDS = {
    "exception": Kind("end", raise_exception, "uncaught RuntimeError"),
    "sys.exit": Kind("end", lambda: sys.exit(3), "sys.exit(3)"),
    "os._exit": Kind("end", lambda: os._exit(3), "os._exit(3)"),
    "SIGTERM": Kind("warning", lambda: os.kill(os.getpid(), signal.SIGTERM)),
    "SIGKILL": Kind("signal", lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "SIGSEGV": Kind("signal", lambda: ctypes.string_at(0)),
    "memory": Kind("end", run_out_of_memory, "uncaught MemoryError"),
    "SIGSTOP": Kind(
        "stall", lambda: os.kill(os.getpid(), signal.SIGSTOP), "is stopped"
    ),
    "loop": Kind("stall", loop_in_python, "in loop_in_python\n"),
    "held": Kind("stall", hold_in_c, "in hold_in_c\n"),
    # It does something else than the others do, instead of failing by itself.
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
    if KINDS[kind].group == "deviation" and moment in ("user code", "writing"):
        return False  # the rank calls nothing, or nothing that has a shape
    # What comes after `finalize` on this rank is the same call, and nothing is written
    # any more.
    return (kind, moment) not in (("shape", "finalize"), ("disk", "finalize"))


# Groups of signals that end a process, the second in good order.
ENDING = ("signal", "warning")
POINTS = [
    (kind, moment) for kind in KINDS for moment in MOMENTS if is_possible(kind, moment)
]
# A handler that loops, inside of the call that all are in, isn't told from a slow
# network.
AT_RANDOM = [
    *(name for name, kind in KINDS.items() if kind.group in ("end", *ENDING, "link")),
    "SIGSTOP",
]
COMMUNICATORS = ("naive", "flat", "hierarchical", "two_dimensional")
# So many seeds have every point once, and random times; STRIDE spreads the points over
# them, so that fewer are a fair sample.
ROUND, STRIDE = 200, 37


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


def draw(seed: int, hosts: bool = True) -> Case:
    """The case of a seed; without hosts none of those that need any."""
    choose = random.Random(seed)
    place = seed * STRIDE % ROUND
    kind, moment = (
        POINTS[place] if place < len(POINTS) else (choose.choice(AT_RANDOM), None)
    )
    ranks = choose.choice((2, 2, 3, 4))
    two = choose.random() < 0.3
    iteration = choose.choice(MOMENTS[moment].iterations) if moment else 0
    # In the background a fault in a thread waits for the next save, unless it ends the
    # process.
    ends_process = KINDS[kind].group in ENDING or kind == "os._exit"
    at_once = (moment != "writing" and kind != "disk") or ends_process
    after, background = choose.random(), choose.random() < 0.3 and at_once
    return Case(
        kind,
        moment,
        iteration,
        launcher="launch" if kind == "link" else choose.choice(("mpiexec", "launch")),
        victim=choose.randrange(ranks),
        ranks=ranks,
        communicator=choose.choice(COMMUNICATORS),
        hosts=2 if hosts and kind != "disk" and (two or kind == "link") else 1,
        background=background,
        overlap=choose.random() < 0.5,
        after=after,
        seed=seed,
    )


class Plan:
    """One fault on one rank, once."""

    updater: Any = None  # of the job, which tells the iteration

    def __init__(
        self, fault: dict[str, Any] | None, rank: int, status: Path, disk: Path
    ) -> None:
        """Plan it, unless it is another rank's, or happened before the job was started again.

        The fault has what a `Case` has; its `after` is in seconds. In `status` the
        runner is told of it; `disk` may be to run full.
        """
        self.status, self.disk = status, disk
        mine = (
            fault is not None
            and fault["victim"] == rank
            and not (status / "fault").exists()
        )
        self.fault = fault if mine else None

    def start(self) -> None:
        """From now on it can happen at its time, whatever goes on then."""
        if self.fault is not None and self.fault["moment"] is None:
            kind = self.fault["kind"]
            signal.signal(signal.SIGALRM, lambda *_: self._strike(kind))
            # 0 would mean never.
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, self.fault["after"]))

    def stop(self) -> None:
        """It was too late: Python is about to give signals back their own meaning."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def at(self, moment: str) -> str:
        """If this is its moment, have it happen, or give its kind for the caller to deviate."""
        fault = self.fault
        if fault is None or fault["moment"] != moment:
            return ""
        if fault["iteration"] and fault["iteration"] != self.updater.iteration:
            return ""
        self.fault = None
        self._strike(fault["kind"])
        return fault["kind"]

    def collective(
        self,
        moment: str,
        comm: Any,
        call: Callable[[Any], T],
        right: Any = None,
        other: Any = None,
    ) -> T | None:
        """A collective call, which the fault may prevent or give the other argument."""
        how = self.at(moment)
        if how == "skip":
            return None
        if how == "other":
            comm.alltoall_obj([None] * comm.size)
        return call(other if how == "shape" else right)

    def _strike(self, kind: str) -> None:
        write_status(self.status / "fault", f"{time.time()}")
        if kind == "disk":
            self._fill()
        elif kind == "link":
            self._await_cut()
        elif strike := KINDS[kind].strike:
            strike()

    def _fill(self) -> None:
        with open(self.disk / "filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    def _await_cut(self) -> None:
        deadline = time.monotonic() + LINK_SECONDS
        while not (self.status / "cut").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("nobody has cut the link")
            time.sleep(0.01)


def write_status(path: Path, text: str) -> None:
    """Write a small file that others see whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    os.replace(new, path)

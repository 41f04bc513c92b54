"""Which fault befalls which job, and when: drawn from a number, which repeats it."""

from __future__ import annotations

import random
from dataclasses import dataclass

# By what a job does after them. A rank that dies:
DEATHS = ("exception", "sys.exit", "os._exit", "SIGTERM", "SIGKILL", "SIGSEGV", "memory")
# One that lives and doesn't come:
STALLS = ("SIGSTOP", "loop", "held")
# One that does something else:
DEVIATIONS = ("skip", "other", "shape")
KINDS = (*DEATHS, *STALLS, *DEVIATIONS, "disk", "link")

STOP = 12  # iterations of a job
# A moment, and the iterations at which it comes; the job saves at every third.
MOMENTS: dict[str, tuple[int, ...]] = {
    "scatter_dataset": (0,),
    "bcast_data": (0,),
    "first update": (0,),
    "collective": (1, 4, 8),
    "user code": (2, 5, 9),
    "checkpoint": (3, 6, 9),
    "writing": (3, 6, 9),
    "finalize": (0,),
}
# Where a deviation is no deviation: there the rank calls nothing, or nothing that has a shape.
IMPOSSIBLE = (
    {(kind, moment) for kind in DEVIATIONS for moment in ("user code", "writing")}
    # What comes after it on this rank is the same call.
    | {("shape", "finalize")}
    # Nothing is written any more.
    | {("disk", "finalize")}
)
POINTS = tuple(
    (kind, moment) for kind in KINDS for moment in MOMENTS if (kind, moment) not in IMPOSSIBLE
)
AT_RANDOM = (*DEATHS, *STALLS, "link")
COMMUNICATORS = ("naive", "flat", "hierarchical", "two_dimensional")
# So many seeds have every point once, and random times; STRIDE spreads the points over them, so
# that fewer are a fair sample.
ROUND, STRIDE = 200, 37
# Before any checkpoint can have been committed.
EARLY = ("scatter_dataset", "bcast_data", "first update")


@dataclass(frozen=True)
class Case:
    """A job and its fault.

    Attributes:
        seed: that it was drawn from.
        kind: of fault.
        moment: when it comes; None for a random time.
        iteration: at which, where the moment comes again and again.
        after: the share of the job's length, where the time is random.
        victim: the rank.
        ranks: of the job.
        communicator: that it uses.
        launcher: "mpiexec" or "launch".
        hosts: on how many hosts it runs.
        background: whether checkpoints are written in the background.
    """

    seed: int
    kind: str
    moment: str | None
    iteration: int
    after: float
    victim: int
    ranks: int
    communicator: str
    launcher: str
    hosts: int
    background: bool

    def __str__(self) -> str:
        when = f"at {self.after:.0%} of the job" if self.moment is None else f"in {self.moment}"
        at = f" {self.iteration}" if self.iteration else ""
        hosts = f" on {self.hosts} hosts" if self.hosts > 1 else ""
        background = ", background checkpoints" if self.background else ""
        return (
            f"seed {self.seed}: {self.kind} {when}{at}, rank {self.victim} of {self.ranks}{hosts}, "
            f"{self.communicator}, {self.launcher}{background}"
        )


def draw(seed: int, hosts: bool = True) -> Case:
    """The case of a seed; without hosts none of those that need any."""
    choose = random.Random(seed)
    place = seed * STRIDE % ROUND
    kind, moment = POINTS[place] if place < len(POINTS) else (choose.choice(AT_RANDOM), None)
    ranks = choose.choice((2, 2, 3, 4))
    two = choose.random() < 0.3
    iteration = choose.choice(MOMENTS[moment]) if moment else 0
    # In the background a fault in a thread waits for the next save, unless it ends the process.
    ends_process = kind in ("SIGTERM", "SIGKILL", "SIGSEGV", "os._exit")
    at_once = (moment != "writing" and kind != "disk") or ends_process
    after, background = choose.random(), choose.random() < 0.3 and at_once
    launcher = "launch" if kind == "link" else choose.choice(("mpiexec", "launch"))
    victim = choose.randrange(ranks)
    communicator = choose.choice(COMMUNICATORS)
    many = 1 if kind == "disk" or not hosts else 2 if kind == "link" or two else 1
    return Case(
        seed,
        kind,
        moment,
        iteration,
        after,
        victim,
        ranks,
        communicator,
        launcher,
        many,
        background,
    )

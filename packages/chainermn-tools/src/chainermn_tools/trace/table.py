"""The tables that hold a run: its calls, its ranks, and the names in them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

# A call of a rank as a row of a table: some 100 bytes each; a long job writes millions.
# Names are given as numbers: their indices in the run's list of names. Times are in
# microseconds, of the rank's own clock until they are aligned.
CALL = np.dtype(
    [
        ("rank", "i4"),  # in MPI.COMM_WORLD
        ("operation", "i4"),  # its name
        ("communicator", "i4"),  # its name, the same on all its ranks
        ("error", "i4"),  # name of the exception that ended it
        # The rank for which the call waited; NONE if there was none, or it is unknown.
        ("late", "i4"),
        ("start", "f8"),
        ("end", "f8"),
        ("waited", "f8"),  # until the last rank had come, as far as is known
        ("nbytes", "i8"),  # payload of this rank; 0 if unknown
        ("sequence", "i8"),  # number of the collective call; NONE for a message
        # Root, or the rank of a message, as the communicator numbers it.
        ("peer", "i8"),
        ("tag", "i8"),  # of a message
        ("thread", "i8"),  # of the rank
    ]
)
# Stands for a missing number of a call.
NONE = -(1 << 31)


def to_json(event: dict[str, Any]) -> str:
    """Return an event as a line of a trace file."""
    return json.dumps(event, separators=(",", ":"))


@dataclass
class RankTrace:
    """The file of one rank."""

    rank: int  # in MPI.COMM_WORLD
    ranks: int  # their number there
    host: str
    began: float  # the time of day when its times were zero, in seconds
    clock: str  # the same text for ranks that share a clock
    zero: float  # the clock's value at that time, in microseconds
    # Of each communicator, its ranks in MPI.COMM_WORLD.
    members: dict[str, list[int]] = field(default_factory=dict)
    # For each communicator: a time of this clock in microseconds, what to add to get
    # the clock of the communicator's rank 0, and how long the question took.
    clocks: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    # Events that are shown as they are, such as names of threads; JSON, since dicts
    # take four times the memory.
    other: list[str] = field(default_factory=list)
    damaged: int = 0  # lines that couldn't be read


class Collective(NamedTuple):
    """A collective call of several ranks, all of which are known."""

    at_seconds: float  # when the last rank came
    operation: str
    communicator: str
    number: int
    rank: int  # the rank that came last
    others_waited_seconds: float  # in sum


@dataclass
class Run:
    """The files of one run of a job."""

    name: str
    ranks: dict[int, RankTrace]  # by number; some may be missing
    # All ranks' calls, rank by rank, in the order in which they ended, shape (n,), dtype
    # `CALL`.
    table: np.ndarray
    names: list[str]  # of operations, communicators and errors
    warnings: list[str]  # warnings for readers of the result

    @property
    def missing(self) -> list[int]:
        """The ranks whose files are missing, or can't be read."""
        number = max(trace.ranks for trace in self.ranks.values())
        return [rank for rank in range(number) if rank not in self.ranks]

    def calls_of(self, rank: int) -> np.ndarray:
        """Return a copy of a rank's part of the table."""
        calls: np.ndarray = self.table[self.table["rank"] == rank]
        return calls

    @property
    def length(self) -> float:
        """Microseconds from the first call's start, 0 in aligned times, to the last one's end."""
        return float(self.table["end"].max(initial=0.0))

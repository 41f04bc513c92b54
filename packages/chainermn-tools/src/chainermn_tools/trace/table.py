"""The tables that hold a run: its calls, its ranks, and the names in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Rows that are taken out of a table at a time.
ROWS_AT_ONCE = 1 << 15
# A call as a row of a table: some 100 bytes each, of which a long job writes millions. Names are
# numbers in a `Names`.
CALL = np.dtype(
    [
        ("rank", "i4"),
        ("operation", "i4"),
        ("communicator", "i4"),
        ("error", "i4"),
        ("late", "i4"),
        ("start", "f8"),
        ("end", "f8"),
        ("waited", "f8"),
        ("nbytes", "i8"),
        ("sequence", "i8"),
        ("peer", "i8"),
        ("tag", "i8"),
        ("thread", "i8"),
    ]
)
# Stands for a missing number of a call.
NONE = -(1 << 31)


class Names:
    """Numbers names in the order in which they are first seen."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of a name."""
        number = self._numbers.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number


class Call(NamedTuple):
    """One call of one rank.

    Attributes:
        rank: in MPI.COMM_WORLD.
        operation: its name.
        communicator: the same text on all its ranks.
        start: microseconds; of the rank's own clock until they are aligned.
        end: likewise.
        nbytes: payload of this rank; 0 where unknown.
        sequence: number of the collective call; None for a message.
        peer: root, or the rank of a message, as the communicator numbers it; None for none.
        tag: of a message.
        thread: of the rank.
        error: name of the exception that ended it.
        waited: microseconds until the last rank had come, as far as is known.
        late: that rank, in MPI.COMM_WORLD; None where nobody was waited for, or nobody knows.
    """

    rank: int
    operation: str
    communicator: str
    start: float
    end: float
    nbytes: int
    sequence: int | None
    peer: int | None
    tag: int | None
    thread: int
    error: str | None
    waited: float
    late: int | None


def each_call(rows: np.ndarray, names: Names) -> Iterator[Call]:
    """Return the rows of a table, shape (n,), dtype ``CALL``, one by one."""
    for at in range(0, len(rows), ROWS_AT_ONCE):
        for row in rows[at : at + ROWS_AT_ONCE].tolist():
            known: dict[str, Any] = dict(zip(CALL.names or (), row, strict=True))
            for name, value in known.items():
                if value == NONE:
                    known[name] = None
                elif name in ("operation", "communicator", "error"):
                    known[name] = names.names[value]
            yield Call(**known)


@dataclass
class RankTrace:
    """The file of one rank.

    Attributes:
        path: its place.
        rank: in MPI.COMM_WORLD.
        ranks: the number of ranks there.
        host: where it ran.
        began: the time of day when its times were zero, in seconds.
        clock: the same text where ranks share a clock.
        zero: what that clock showed then, in microseconds.
        names: of operations, communicators and errors.
        members: of each communicator, its ranks in MPI.COMM_WORLD.
        clocks: of each communicator: microseconds of this clock, what is to be added to it to have
            the clock of the communicator's rank 0, and how long the question took.
        rows: its calls in the order in which they ended, shape (n,), dtype ``CALL``; a part of
            the run's table.
        other: events that are shown as they are, such as names of threads.
        damaged: lines that couldn't be read.
    """

    path: Path
    rank: int
    ranks: int
    host: str
    began: float
    clock: str
    zero: float
    names: Names
    members: dict[str, list[int]] = field(default_factory=dict)
    clocks: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, CALL))
    other: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0

    @property
    def calls(self) -> Iterator[Call]:
        """The calls one by one."""
        return each_call(self.rows, self.names)


@dataclass
class Run:
    """The files of one run of a job.

    Attributes:
        name: of the run.
        ranks: by number; not all need be there.
        table: all ranks' calls, rank by rank, shape (n,), dtype ``CALL``.
        names: of operations, communicators and errors.
        warnings: what whoever reads the result should know.
    """

    name: str
    ranks: dict[int, RankTrace]
    table: np.ndarray
    names: Names
    warnings: list[str]

    @property
    def calls(self) -> Iterator[Call]:
        """The calls one by one."""
        return each_call(self.table, self.names)

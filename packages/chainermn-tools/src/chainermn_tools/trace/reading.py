"""Reads trace files, whole ones and what is left of others; docs/trace.md describes them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE_NAME = re.compile(r"(?P<run>.+)\.rank(?P<rank>\d+)\.json")
# Names of the metadata events that are ours, as chainermn_comm.trace.events has them.
FILE, COMMUNICATOR, CLOCK = "chainermn", "chainermn communicator", "chainermn clock"
SCHEMA = 1
# Most old runs that are listed by name.
MOST_NAMES = 5


class NoTrace(Exception):
    """There is nothing that could be read; the message says what and why."""


@dataclass(slots=True)
class Call:
    """One call of one rank.

    Attributes:
        rank: in MPI.COMM_WORLD.
        operation: its name.
        communicator: the same text on all its ranks.
        start, end: microseconds; of the rank's own clock until they are aligned.
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
    waited: float = 0.0
    late: int | None = None

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e6


@dataclass
class RankTrace:
    """The file of one rank.

    Attributes:
        path: its place.
        rank, ranks: in MPI.COMM_WORLD.
        host: where it ran.
        began: the time of day when its times were zero, in seconds.
        clock: the same text where ranks share a clock.
        zero: what that clock showed then, in microseconds.
        members: of each communicator, its ranks in MPI.COMM_WORLD.
        clocks: of each communicator: microseconds of this clock, what is to be added to it to have
            the clock of the communicator's rank 0, and how long the question took.
        calls: in the order in which they ended.
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
    members: dict[str, list[int]] = field(default_factory=dict)
    clocks: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    other: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0


@dataclass
class Run:
    """The files of one run of a job.

    Attributes:
        name: of the run.
        ranks: by number; not all need be there.
        remarks: what whoever reads the result should know.
    """

    name: str
    ranks: dict[int, RankTrace]
    remarks: list[str]

    @property
    def calls(self) -> Iterator[Call]:
        return (call for trace in self.ranks.values() for call in trace.calls)


def read(folder: Path, wanted: str | None = None) -> Run:
    """Read the newest run of a folder, or the one that is wanted.

    Raises:
        NoTrace: there is none.
    """
    groups = _runs(folder)
    if not groups:
        raise NoTrace(
            f"there is no trace in {folder}; a job writes one with CHAINERMN_TRACE={folder}"
        )
    if wanted is None:
        chosen = max(groups, key=lambda group: max(group))
    else:
        found = [group for group in groups if wanted in group]
        if not found:
            names = ", ".join(sorted(min(group) for group in groups))
            raise NoTrace(f"there is no run {wanted!r} in {folder}; there are {names}")
        chosen = found[0]
    traces = [_read_file(path) for paths in chosen.values() for path in paths]
    good = [trace for trace in traces if isinstance(trace, RankTrace)]
    remarks = [trace for trace in traces if isinstance(trace, str)]
    if not good:
        raise NoTrace(f"no trace in {folder} can be read: {'; '.join(remarks)}")
    ranks: dict[int, RankTrace] = {}
    for trace in sorted(good, key=lambda one: one.began):
        if trace.rank in ranks:
            remarks.append(
                f"{ranks[trace.rank].path.name} is older than {trace.path.name}: left out"
            )
        ranks[trace.rank] = trace
    others = sorted(min(group) for group in groups if group is not chosen)
    return Run(min(chosen), dict(sorted(ranks.items())), remarks + _remarks(ranks, others))


def _remarks(ranks: dict[int, RankTrace], others: list[str]) -> list[str]:
    found = []
    number = max(trace.ranks for trace in ranks.values())
    missing = [rank for rank in range(number) if rank not in ranks]
    if missing:
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        found.append(f"no file of {len(missing)} of {number} ranks: {shown}")
    for trace in ranks.values():
        if trace.damaged:
            s = "s" if trace.damaged > 1 else ""
            found.append(
                f"rank {trace.rank}: {trace.damaged} line{s} of {trace.path.name} can't be read, "
                "as after a kill or on a full disk"
            )
    if others:
        more = f" and {len(others) - MOST_NAMES} more" if len(others) > MOST_NAMES else ""
        found.append(
            f"the folder has other runs, to be seen with --run: "
            f"{', '.join(others[-MOST_NAMES:])}{more}"
        )
    return found


def _runs(folder: Path) -> list[dict[str, list[Path]]]:
    """Files by run; runs whose ranks came to be in one communicator belong together."""
    files: dict[str, list[Path]] = {}
    try:
        for path in sorted(folder.iterdir()):
            name = FILE_NAME.fullmatch(path.name)
            if name is not None and path.is_file():
                files.setdefault(name["run"], []).append(path)
    except OSError as problem:
        raise NoTrace(f"{folder} can't be read: {problem.strerror}") from None
    groups = {run: {run: paths} for run, paths in files.items()}
    for run, paths in files.items():
        for joined in {one for path in paths for one in _joined(path)}:
            ours, theirs = groups[run], groups.get(joined)
            if theirs is not None and theirs is not ours:
                ours |= theirs
                groups |= dict.fromkeys(theirs, ours)
    return list({id(group): group for group in groups.values()}.values())


def _joined(path: Path) -> set[str]:
    """The runs of the communicators that a file tells of."""
    return {
        str(event["args"].get("run"))
        for event in _events(path, f'"{COMMUNICATOR}"')
        if isinstance(event, dict)
        and event.get("name") == COMMUNICATOR
        and isinstance(event.get("args"), dict)
    }


def _events(path: Path, only: str = "") -> Iterator[Any]:
    """The events of a file; None for a line that is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                text = line.strip().rstrip(",")
                if text not in ("", "[", "]") and only in text:
                    yield _event(text)
    except OSError:
        return


def _event(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_file(path: Path) -> RankTrace | str:
    """A file, or why it is none."""
    events = _events(path)
    trace = _begun(path, next(events, None))
    if trace is None:
        return f"{path.name} doesn't begin as a trace does"
    for event in events:
        trace.damaged += not _is_taken(trace, event)
    return trace


def _begun(path: Path, event: Any) -> RankTrace | None:
    try:
        said = event["args"]
        rank, ranks = int(said["rank"]), int(said["ranks"])
        if event["name"] != FILE or said["schema"] != SCHEMA or not 0 <= rank < ranks:
            return None
        clock = str(said["clock"]), _finite(said["zero"])
        return RankTrace(path, rank, ranks, str(said["host"]), _finite(said["began"]), *clock)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _is_taken(trace: RankTrace, event: Any) -> bool:
    """Whether the event could be read."""
    try:
        said = event["args"]
        if event["ph"] == "X":
            trace.calls.append(_call(trace.rank, event, said))
        elif event["name"] == COMMUNICATOR:
            trace.members[str(said["communicator"])] = [int(rank) for rank in said["ranks"]]
        elif event["name"] == CLOCK:
            found = _finite(said["at"]), _finite(said["ahead"]), _finite(said["round_trip"])
            trace.clocks.setdefault(str(said["communicator"]), []).append(found)
        else:
            trace.other.append(event)
    except (KeyError, TypeError, ValueError, OverflowError):
        return False
    return True


def _call(rank: int, event: Any, said: Any) -> Call:
    start = _finite(event["ts"])
    error = said.get("error")
    return Call(
        rank,
        str(event["name"]),
        str(said["communicator"]),
        start,
        start + max(0.0, _finite(event["dur"])),
        int(said["bytes"]),
        _number(said.get("sequence")),
        _number(said.get("root", said.get("peer"))),
        _number(said.get("tag")),
        int(event["tid"]),
        None if error is None else str(error),
    )


def _number(value: Any) -> int | None:
    return None if value is None else int(value)


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(number)
    return number

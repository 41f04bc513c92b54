"""Reads trace files, whole or cut off; docs/trace.md describes them."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from chainermn_tools.formatting import format_count, join_first
from chainermn_tools.trace.table import CALL, NONE, RankTrace, Run, to_json

FILE_NAME = re.compile(r"(?P<run>.+)\.rank(?P<rank>\d+)\.json")
# The names of our metadata events, as in chainermn_comm.trace.file.
FILE = "chainermn"
COMMUNICATOR = "chainermn communicator"
CLOCK = "chainermn clock"
SCHEMA = 1
# How many other runs, and how many missing ranks, are listed.
MAX_LISTED = 10
# Larger numbers in a file are damage.
MAX_INTEGER = 1 << 62
# The errors that are raised if a part of an event is missing or malformed.
DAMAGE = (KeyError, TypeError, ValueError, OverflowError)


class NoTrace(Exception):
    """There is nothing that could be read; the message says what and why."""


def is_trace(path: Path) -> bool:
    """Return whether a path is named as the trace of a rank is."""
    return FILE_NAME.fullmatch(path.name) is not None


def read(folder: Path, wanted: str | None = None) -> Run:
    """Read the newest run of a folder, or the wanted run; raise NoTrace if there is none.

    A rank's file stands for its run.
    """
    name = FILE_NAME.fullmatch(folder.name)
    if name and folder.is_file():
        folder = folder.parent
        wanted = wanted or name["run"]
    if folder.is_file():
        raise NoTrace(f"{folder} is no trace: its name must end in .rankN.json")
    files = _files(folder)
    if not files:
        raise NoTrace(
            f"there is no trace in {folder}; a job writes one with CHAINERMN_TRACE={folder}"
        )
    chosen = wanted or max(files)
    if chosen not in files:
        known = ", ".join(sorted(files))
        raise NoTrace(f"there is no run {chosen!r} in {folder}; there are {known}")
    run = Run(chosen, {}, np.empty(0, CALL), [], [])
    run.table = np.fromiter(_calls(files.pop(chosen), run), CALL)
    if not run.ranks:
        raise NoTrace(f"no trace in {folder} can be read: {'; '.join(run.warnings)}")
    _warn(run)
    if files:
        others = join_first(sorted(files, reverse=True), MAX_LISTED)
        run.warnings.append(
            f"the folder has other runs, to be seen with --run: {others}"
        )
    return run


def _warn(run: Run) -> None:
    """Add to the run's warnings which ranks are missing or damaged."""
    if run.missing:
        missing = format_count(len(run.missing), "rank")
        listed = join_first(run.missing, MAX_LISTED)
        run.warnings.append(f"no readable file of {missing}: {listed}")
    for trace in run.ranks.values():
        if trace.damaged:
            lines = format_count(trace.damaged, "line")
            why = "can't be read, as after a kill or on a full disk"
            run.warnings.append(f"rank {trace.rank}: {lines} {why}")


def _files(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each run, in the order of their ranks."""
    files: dict[str, list[tuple[int, Path]]] = defaultdict(list)
    try:
        for path in folder.iterdir():
            name = FILE_NAME.fullmatch(path.name)
            if name and path.is_file():
                files[name["run"]].append((int(name["rank"]), path))
    except OSError as error:
        raise NoTrace(f"{folder} can't be read: {error.strerror}") from None
    return {run: [path for _, path in sorted(each)] for run, each in files.items()}


def _events(path: Path) -> Iterator[Any]:
    """Yield the events of a file; None for a line that is no event."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            text = line.strip().rstrip(",")
            if text not in ("", "[", "]"):
                yield _parsed(text)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _calls(paths: Sequence[Path], run: Run) -> Iterator[tuple[float, ...]]:
    """Return the calls in files as rows of ``CALL``; the run gets all their other contents."""
    names: dict[str, int] = {}
    for path in paths:
        try:
            yield from _calls_of(path, run, names)
        except OSError as error:
            run.warnings.append(f"{path.name} can't be read: {error.strerror}")
        except DAMAGE:
            run.warnings.append(
                f"{path.name} is empty, or doesn't begin as a trace does"
            )
    run.names[:] = names


def _calls_of(
    path: Path, run: Run, names: dict[str, int]
) -> Iterator[tuple[float, ...]]:
    """Return the calls in a file; raise what ``DAMAGE`` lists for a file that is no trace."""
    events = _events(path)
    trace = _header(next(events, None))
    run.ranks[trace.rank] = trace
    for event in events:
        try:
            if event["ph"] == "X":
                yield _call(trace.rank, event, names)
            else:
                _take(trace, event)
        except DAMAGE:
            trace.damaged += 1


def _header(event: Any) -> RankTrace:
    args = event["args"]
    trace = RankTrace(
        rank=_integer(args["rank"]),
        ranks=_integer(args["ranks"]),
        host=str(args["host"]),
        began=_finite(args["began"]),
        clock=str(args["clock"]),
        zero=_finite(args["zero"]),
    )
    if event["name"] != FILE or args["schema"] != SCHEMA:
        raise ValueError(event)
    return trace


def _call(rank: int, event: Any, names: dict[str, int]) -> tuple[float, ...]:
    """Return a call as a row of ``CALL``; new names are added to the known ones."""
    args = event["args"]
    operation = names.setdefault(str(event["name"]), len(names))
    communicator = names.setdefault(str(args["communicator"]), len(names))
    error = NONE
    if args.get("error") is not None:
        error = names.setdefault(str(args["error"]), len(names))
    late = NONE
    start = _finite(event["ts"])
    end = start + max(0.0, _finite(event["dur"]))
    waited = 0.0
    nbytes = _integer(args["bytes"])
    sequence = _integer(args.get("sequence"))
    peer = _integer(args.get("root", args.get("peer")))
    tag = _integer(args.get("tag"))
    thread = _integer(event["tid"])
    known = (rank, operation, communicator, error, late, start, end, waited)
    return (*known, nbytes, sequence, peer, tag, thread)


def _take(trace: RankTrace, event: Any) -> None:
    """Add an event that is no call to the trace."""
    args = event["args"]
    if event["name"] == COMMUNICATOR:
        ranks = [_integer(rank) for rank in args["ranks"]]
        trace.members[str(args["communicator"])] = ranks
    elif event["name"] == CLOCK:
        at = _finite(args["at"])
        ahead = _finite(args["ahead"])
        round_trip = _finite(args["round_trip"])
        comparisons = trace.clocks.setdefault(str(args["communicator"]), [])
        comparisons.append((at, ahead, round_trip))
    else:
        trace.other.append(to_json(event))


def _integer(value: Any) -> int:
    if value is None:
        return NONE
    number = int(value)
    if abs(number) > MAX_INTEGER:
        raise OverflowError(number)
    return number


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(number)
    return number

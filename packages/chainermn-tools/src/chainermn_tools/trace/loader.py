"""Reads trace files, whole or cut off; docs/trace.md describes them."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from chainermn_tools.formatting import format_count, join_first
from chainermn_tools.trace.table import CALL, NONE, RankTrace, Run, to_json

FILE_NAME = re.compile(r"(?P<run>.+)\.rank(?P<rank>\d+)\.json")
# Names of the metadata events that are ours, as chainermn_comm.trace.file has them.
FILE, COMMUNICATOR, CLOCK = "chainermn", "chainermn communicator", "chainermn clock"
SCHEMA = 1
# Old runs, and ranks that are missing, that are listed.
MAX_LISTED_RUNS, MAX_LISTED_RANKS = 5, 10
# What is larger in a file is damage.
MAX_INTEGER, MAX_RANKS = 1 << 62, 1 << 20
# Of one line, which holds one event; a longer one is damaged.
MAX_LINE_CHARACTERS = 1 << 20
# What is raised where something of an event is missing, or not what it should be.
DAMAGE = (KeyError, TypeError, ValueError, OverflowError)


class NoTrace(Exception):
    """There is nothing that could be read; the message says what and why."""


def is_trace(path: Path) -> bool:
    """Return whether a path is named as the trace of a rank is."""
    return FILE_NAME.fullmatch(path.name) is not None


def read(folder: Path, wanted: str | None = None) -> Run:
    """Read the newest run of a folder, or the one that is wanted; raise NoTrace without any.

    A file of a rank stands for its run.
    """
    if (name := FILE_NAME.fullmatch(folder.name)) and folder.is_file():
        folder, wanted = folder.parent, wanted or name["run"]
    groups = _runs(folder)
    if not groups:
        raise NoTrace(
            f"there is no trace in {folder}; a job writes one with CHAINERMN_TRACE={folder}"
        )
    found = groups if wanted is None else [group for group in groups if wanted in group]
    if not found:
        known = ", ".join(sorted(min(group) for group in groups))
        raise NoTrace(f"there is no run {wanted!r} in {folder}; there are {known}")
    chosen = max(found, key=max)
    names: dict[str, int] = {}
    traces = [_read_file(path, names) for paths in chosen.values() for path in paths]
    good = [trace for trace in traces if isinstance(trace, RankTrace)]
    warnings = [trace for trace in traces if isinstance(trace, str)]
    if not good:
        raise NoTrace(f"no trace in {folder} can be read: {'; '.join(warnings)}")
    ranks: dict[int, RankTrace] = {}
    for trace in sorted(good, key=lambda one: one.began):
        if older := ranks.get(trace.rank):
            warnings.append(
                f"{older.path.name} is older than {trace.path.name}: left out"
            )
        ranks[trace.rank] = trace
    others = sorted(min(group) for group in groups if group is not chosen)
    warnings += _warnings_of(ranks, others)
    ranks = dict(sorted(ranks.items()))
    ends = np.cumsum([len(trace.rows) for trace in ranks.values()])
    table = np.empty(ends[-1], CALL)
    for trace, part in zip(ranks.values(), np.split(table, ends[:-1]), strict=True):
        part[:] = trace.rows
        trace.rows = part
    return Run(min(chosen), ranks, table, list(names), warnings)


def _warnings_of(ranks: dict[int, RankTrace], others: list[str]) -> Iterator[str]:
    number = max(trace.ranks for trace in ranks.values())
    missing = [rank for rank in range(number) if rank not in ranks]
    if missing:
        listed = join_first(missing, MAX_LISTED_RANKS)
        yield f"no file of {len(missing)} of {number} ranks: {listed}"
    for trace in ranks.values():
        if trace.damaged:
            lines = format_count(trace.damaged, "line")
            where = f"rank {trace.rank}: {lines} of {trace.path.name}"
            yield f"{where} can't be read, as after a kill or on a full disk"
    if others:
        more = (
            f" and {len(others) - MAX_LISTED_RUNS} more"
            if len(others) > MAX_LISTED_RUNS
            else ""
        )
        names = ", ".join(others[-MAX_LISTED_RUNS:])
        yield f"the folder has other runs, to be seen with --run: {names}{more}"


def _runs(folder: Path) -> list[dict[str, list[Path]]]:
    """Return files by run; runs whose ranks came to be in one communicator are one."""
    files: dict[str, list[Path]] = {}
    try:
        for path in sorted(folder.iterdir()):
            name = FILE_NAME.fullmatch(path.name)
            if name is not None and path.is_file():
                files.setdefault(name["run"], []).append(path)
    except OSError as error:
        raise NoTrace(f"{folder} can't be read: {error.strerror}") from None
    groups = {run: {run: paths} for run, paths in files.items()}
    for run, paths in files.items():
        for joined in {one for path in paths for one in _joined(path)}:
            ours, theirs = groups[run], groups.get(joined)
            if theirs is not None and theirs is not ours:
                ours |= theirs
                groups |= dict.fromkeys(theirs, ours)
    return list({id(group): group for group in groups.values()}.values())


def _joined(path: Path) -> Iterator[str]:
    """Return the runs of the communicators that a file names."""
    for event in _events(path, f'"{COMMUNICATOR}"'):
        with contextlib.suppress(*DAMAGE):
            if event["name"] == COMMUNICATOR:
                yield str(event["args"]["run"])


def _events(path: Path, only: str = "") -> Iterator[Any]:
    """Return the events of a file, one by one; None for a line that is none, or too long."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(MAX_LINE_CHARACTERS):
                text = line.strip().rstrip(",")
                if len(line) == MAX_LINE_CHARACTERS and not line.endswith("\n"):
                    while line and not line.endswith("\n"):
                        line = file.readline(MAX_LINE_CHARACTERS)
                    yield None
                elif text not in ("", "[", "]") and only in text:
                    try:
                        yield json.loads(text)
                    except (ValueError, RecursionError):
                        yield None
    except OSError:
        return


def _read_file(path: Path, names: dict[str, int]) -> RankTrace | str:
    """Return the trace in a file, or why it is none."""
    events = _events(path)
    try:
        trace = _parse_header(path, next(events, None))
    except DAMAGE:
        return f"{path.name} doesn't begin as a trace does"

    def rows() -> Iterator[tuple[int | float, ...]]:
        for event in events:
            try:
                if row := _take(trace, event, names):
                    yield row
            except DAMAGE:
                trace.damaged += 1

    trace.rows = np.fromiter(rows(), CALL)
    return trace


def _parse_header(path: Path, event: Any) -> RankTrace:
    args = event["args"]
    rank, ranks = int(args["rank"]), int(args["ranks"])
    if (
        event["name"] != FILE
        or args["schema"] != SCHEMA
        or not 0 <= rank < ranks <= MAX_RANKS
    ):
        raise ValueError(event)
    host, clock = str(args["host"]), str(args["clock"])
    return RankTrace(
        path, rank, ranks, host, _finite(args["began"]), clock, _finite(args["zero"])
    )


def _take(
    trace: RankTrace, event: Any, names: dict[str, int]
) -> tuple[int | float, ...] | None:
    """Add an event to the trace, or return it as a row of ``CALL`` if it is a call."""
    args = event["args"]
    if event["ph"] == "X":
        start = _finite(event["ts"])
        end = start + max(0.0, _finite(event["dur"]))
        peer = args.get("root", args.get("peer"))
        found = args["bytes"], args.get("sequence"), peer, args.get("tag"), event["tid"]
        numbers = [_integer(one) for one in found]
        error = args.get("error")
        texts = (
            str(event["name"]),
            str(args["communicator"]),
            None if error is None else str(error),
        )
        named = (
            NONE if text is None else names.setdefault(text, len(names))
            for text in texts
        )
        return (trace.rank, *named, NONE, start, end, 0.0, *numbers)
    if event["name"] == COMMUNICATOR:
        trace.members[str(args["communicator"])] = [
            _integer(rank) for rank in args["ranks"]
        ]
    elif event["name"] == CLOCK:
        comparison = (
            _finite(args["at"]),
            _finite(args["ahead"]),
            _finite(args["round_trip"]),
        )
        trace.clocks.setdefault(str(args["communicator"]), []).append(comparison)
    else:
        trace.other.append(to_json(event))
    return None


def _integer(value: Any) -> int:
    number = NONE if value is None else int(value)
    if abs(number) > MAX_INTEGER:
        raise OverflowError(number)
    return number


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(number)
    return number

"""Finds what a report shows: a log of LogReport, a trace, and what `chainermn env` found."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chainermn_tools import trace

LOG = "log"  # the name of a file, like the next one
ENVIRONMENT = "env.json"
TRACE = "trace"
FOUND = {
    LOG: "a log of LogReport",
    ENVIRONMENT: "what `chainermn env --json` prints",
    TRACE: "a trace, which a job with CHAINERMN_TRACE writes",
}


class NoReport(Exception):
    """There is nothing that can be shown; the message says what and why."""


@dataclass
class Inputs:
    """What a report shows; None where it wasn't found."""

    log: list[dict[str, Any]] | None = None
    # Of the trace, as `trace.summarize` returns it.
    summary: dict[str, Any] | None = None
    # Of the trace, as `trace.time_lines` returns it.
    timeline: dict[str, Any] | None = None
    environment: dict[str, Any] | None = None
    environment_of: str = ""  # where the environment was found
    notes: list[str] = field(default_factory=list)  # what is missing


def find(paths: Sequence[Path]) -> Inputs:
    """Read files, and the files of folders; a trace may be one folder deeper.

    Notes name what is missing or can't be read. Raise NoReport if there is neither a
    log nor a trace, or if there are two of a kind.
    """
    path_of = _paths_by_kind(paths)
    found = Inputs()
    for kind, read in READERS.items():
        if kind in path_of:
            try:
                read(found, path_of[kind])
            except (NoReport, trace.NoTrace) as error:
                found.notes.append(str(error))
        elif kind != ENVIRONMENT:  # this machine's environment is shown instead
            found.notes.append(f"not found: {FOUND[kind]}")
    if found.log is None and found.summary is None:
        where = ", ".join(map(str, paths))
        raise NoReport(f"in {where}: {'; '.join(found.notes)}")
    return found


def _read_log(found: Inputs, path: Path) -> None:
    log = _read(path, LOG, list)
    if not all(isinstance(entry, dict) for entry in log or [None]):
        raise NoReport(f"{path} is not {FOUND[LOG]}")
    found.log = log


def _read_environment(found: Inputs, path: Path) -> None:
    found.environment = _read(path, ENVIRONMENT, dict)
    found.environment_of = str(path)


def _read_trace(found: Inputs, path: Path) -> None:
    run = trace.read(path)
    uncertainty = trace.align(run)
    found.summary = trace.summarize(run, *trace.match(run), uncertainty)
    found.timeline = trace.time_lines(run, found.summary)


READERS = {LOG: _read_log, ENVIRONMENT: _read_environment, TRACE: _read_trace}


def _paths_by_kind(paths: Sequence[Path]) -> dict[str, Path]:
    """Return the path of each kind of input, at most one of each kind."""
    found: dict[str, Path] = {}
    for path in paths:
        try:
            for kind, part in _kinds(path):
                if found.setdefault(kind, part) != part:
                    both = f"{found[kind]} and {part} are both {FOUND[kind]}"
                    raise NoReport(f"{both}: give one of them")
        except OSError as error:
            raise NoReport(f"{path} can't be read: {error.strerror}") from None
    return found


def _kinds(path: Path) -> Iterator[tuple[str, Path]]:
    """Return what a path is, or what a folder holds: pairs of kind and path."""
    if path.is_dir():
        for name in (LOG, ENVIRONMENT):
            if path.joinpath(name).is_file():
                yield name, path / name
        for folder in (path, *sorted(filter(Path.is_dir, path.iterdir()))):
            with suppress(OSError):  # others' folders beside the trace
                if any(map(trace.is_trace, folder.iterdir())):
                    yield TRACE, folder
    elif trace.is_trace(path):
        yield TRACE, path
    elif path.read_bytes().lstrip()[:1] == b"{":
        yield ENVIRONMENT, path
    else:
        yield LOG, path


def _read(path: Path, kind: str, form: type) -> Any:
    """Return the contents of a file of JSON, which must have this form, as all of this kind do."""
    try:
        text = path.read_text("utf-8", errors="replace")
        if not text.strip():
            raise NoReport(f"{path} is empty")
        found = json.loads(text)
    except OSError as error:
        raise NoReport(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise NoReport(
            f"{path} is not {FOUND[kind]}, or only a part of it: its JSON is damaged"
        ) from None
    if not isinstance(found, form):
        raise NoReport(f"{path} is not {FOUND[kind]}")
    return found

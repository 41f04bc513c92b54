"""This process's own trace, begun anew for a test, and what stands in it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from chainermn_comm.trace import TRACE_VARIABLE, file, tracer


@contextmanager
def traced_into(folder: Path):
    """Meanwhile new communicators trace into that folder."""
    with (
        mock.patch.object(file, "_file", None),
        mock.patch.dict(os.environ, {TRACE_VARIABLE: str(folder)}),
    ):
        yield


def events(folder: Path, rank: int) -> list[dict]:
    """What a rank wrote; the file lacks only the array's closing bracket."""
    (path,) = folder.glob(f"*.rank{rank}.json")
    text = path.read_text()
    assert text.startswith("[\n")
    assert text.endswith("},\n")
    return json.loads(text[:-2] + "]")


def calls(folder: Path, rank: int) -> list[dict]:
    return [event for event in events(folder, rank) if event["ph"] == "X"]


def note_message(comm):
    """Have a call traced, as the communicator's methods do, without making any."""
    comm._observer.message("send", 0, 0)
    comm._observer.leave()


def write_to(path: str):
    """From now on this process's trace goes into that file."""
    assert file._file is not None
    file._file._descriptor = os.open(path, os.O_WRONLY)


def is_traced(comm) -> bool:
    """Whether calls on the communicator pass a line that traces them (collective)."""
    passed: set[str] = set()

    def note(frame, *_):
        passed.add(frame.f_globals["__name__"])

    sys.setprofile(note)
    try:
        comm.allreduce(1.0)
    finally:
        sys.setprofile(None)
    assert "chainermn_comm.messaging.handshake" in passed
    return any(name.startswith("chainermn_comm.trace") for name in passed)


def on_machine(number: int, now: Callable[[], float]):
    """From now on this process traces as if it were on another machine, with that clock."""
    for module in (file, tracer):
        module.now = now
    file._clock = lambda: f"machine {number}"

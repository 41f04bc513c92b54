"""What a trace file says, as lines of JSON in Chrome's trace event format.

The file is an array whose closing bracket may be missing; each line is an event and a comma.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ..watchdog import NOBODY

# Raised when an event's argument changes its name or meaning.
SCHEMA = 1
OPENING = "[\n"
# Names of the metadata events that are ours; viewers leave them alone.
FILE, COMMUNICATOR, CLOCK = "chainermn", "chainermn communicator", "chainermn clock"


class Call(NamedTuple):
    """One call on a communicator.

    Attributes:
        operation: its name.
        communicator: the same text on all its ranks.
        start, end: seconds, of this process's clock.
        met: when all ranks had come; 0 where it wasn't noted.
        sequence: number of the collective call; None for a message.
        nbytes: payload of this rank.
        peer: root, or the rank of a message; NOBODY for none.
        tag: of a message; NOBODY for none.
        thread: that called.
        error: name of the exception that ended it; None for none.
    """

    operation: str
    communicator: str
    start: float
    end: float
    met: float
    sequence: int | None
    nbytes: int
    peer: int
    tag: int
    thread: int
    error: str | None


def of_call(call: Call, rank: int, zero: float, thread: int) -> str:
    """The line of a call; ``zero`` is the time that the file counts from."""
    collective = call.sequence is not None
    said: dict[str, Any] = {"communicator": call.communicator, "bytes": call.nbytes}
    if collective:
        said["sequence"] = call.sequence
        if call.peer != NOBODY:
            said["root"] = call.peer
        if call.met:
            said["waited"] = _micros(call.met - call.start)
    else:
        said["peer"], said["tag"] = call.peer, call.tag
    if call.error is not None:
        said["error"] = call.error
    return _line(
        {
            "name": call.operation,
            "cat": "collective" if collective else "message",
            "ph": "X",
            "pid": rank,
            "tid": thread,
            "ts": _micros(call.start - zero),
            "dur": _micros(call.end - call.start),
            "args": said,
        }
    )


def metadata(event: str, rank: int, thread: int = 0, /, **said: Any) -> str:
    """The line of an event that has no time of its own."""
    return _line({"name": event, "ph": "M", "pid": rank, "tid": thread, "args": said})


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + ",\n"

"""What a trace file says, as lines of JSON in Chrome's trace event format.

The file is an array whose closing bracket may be missing; each line is an event and a comma.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from ..watchdog import NOBODY

# Raised when an event's argument changes its name or meaning.
SCHEMA = 1
OPENING = "[\n"
# Names of the metadata events that are ours; viewers leave them alone.
FILE, COMMUNICATOR, CLOCK = "chainermn", "chainermn communicator", "chainermn clock"


# What a call is, of which there are few kinds: operation, name of the communicator, whether it is
# collective, bytes, root or peer, tag. And one call, as cheap to make as can be: its kind; number
# of the collective call; start, end, and when all ranks had come (0: not noted), in seconds of
# this process's clock; the thread; name of the exception that ended it.
Kind = tuple[str, str, bool, int, int, int]
Call = tuple[Kind, int, float, float, float, int, str | None]


def of_call(call: Call, rank: int, zero: float, thread: int) -> str:
    """The line of a call; ``zero`` is the time that the file counts from."""
    kind, sequence, start, end, met, _, error = call
    head, middle, tail = _parts(kind, rank, thread)
    line = f"{head}{(start - zero) * 1e6:.3f}{middle}{(end - start) * 1e6:.3f}{tail}"
    if kind[2]:
        line += f',"sequence":{sequence}'
        if met:
            line += f',"waited":{(met - start) * 1e6:.3f}'
    if error is not None:
        line += f',"error":{json.dumps(error)}'
    return line + "}},\n"


@functools.lru_cache(maxsize=256)
def _parts(kind: Kind, rank: int, thread: int) -> tuple[str, str, str]:
    """What lines have in common, before, between and after their times.

    Made once for many lines, since of all that tracing costs writing them is the most.
    """
    operation, communicator, collective, nbytes, peer, tag = kind
    head = (
        f'{{"name":{json.dumps(operation)},"cat":"{"collective" if collective else "message"}",'
        f'"ph":"X","pid":{rank},"tid":{thread},"ts":'
    )
    tail = f',"args":{{"communicator":{json.dumps(communicator)},"bytes":{nbytes}'
    if not collective:
        tail += f',"peer":{peer},"tag":{tag}'
    elif peer != NOBODY:
        tail += f',"root":{peer}'
    return head, ',"dur":', tail


def metadata(event: str, rank: int, thread: int = 0, /, **said: Any) -> str:
    """The line of an event that has no time of its own."""
    return _line({"name": event, "ph": "M", "pid": rank, "tid": thread, "args": said})


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + ",\n"

"""The contents of a trace file, as lines of JSON in Chrome's trace event format.

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


# Operation, name of the communicator, whether it is collective, bytes, root or peer, tag: there are
# few kinds of calls. A call is a tuple, which is cheap to make: its kind; number of the collective
# call; start, end, and when all ranks had arrived (0: unknown), in seconds of this process's clock;
# the thread; name of the exception that ended it.
Kind = tuple[str, str, bool, int, int, int]
Call = tuple[Kind, int, float, float, float, int, str | None]


def format_call(call: Call, rank: int, zero: float, thread: int) -> str:
    """Return the line of a call.

    ``zero`` is the time that the file counts from, in seconds of this process's clock, and
    ``thread`` the thread's number in the file.
    """
    kind, sequence, start, end, arrived, _, error = call
    head, middle, tail = _parts(kind, rank, thread)
    line = f"{head}{(start - zero) * 1e6:.3f}{middle}{(end - start) * 1e6:.3f}{tail}"
    if kind[2]:
        line += f',"sequence":{sequence}'
        if arrived:
            line += f',"waited":{(arrived - start) * 1e6:.3f}'
    if error is not None:
        line += f',"error":{json.dumps(error)}'
    return line + "}},\n"


@functools.lru_cache(maxsize=256)
def _parts(kind: Kind, rank: int, thread: int) -> tuple[str, str, str]:
    """Return what lines have in common, before, between and after their times.

    It is made once for many lines, since formatting is most of what tracing costs.
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


def metadata(event: str, rank: int, thread: int = 0, /, **args: Any) -> str:
    """Return the line of an event that has no time of its own."""
    line = {"name": event, "ph": "M", "pid": rank, "tid": thread, "args": args}
    return json.dumps(line, separators=(",", ":")) + ",\n"

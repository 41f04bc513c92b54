"""What a trace file says, as lines of JSON in Chrome's trace event format.

The file is an array whose closing bracket may be missing; each line is an event and a comma.
"""

from __future__ import annotations

import functools
import json
from typing import Any, Final

from ..watchdog import NOBODY

# Raised when an event's argument changes its name or meaning.
SCHEMA = 1
OPENING = "[\n"
# Names of the metadata events that are ours; viewers leave them alone.
FILE, COMMUNICATOR, CLOCK = "chainermn", "chainermn communicator", "chainermn clock"


# One call on a communicator, as cheap to make as can be: operation; name of the communicator;
# start and end in seconds of this process's clock; when all ranks had come, or 0 where that wasn't
# noted; number of the collective call, None for a message; bytes; root or peer; tag; the thread
# that called; name of the exception that ended it, or None.
Call = tuple[str, str, float, float, float, int | None, int, int, int, int, str | None]
THREAD: Final = 9  # where it stands there


def of_call(call: Call, rank: int, zero: float, thread: int) -> str:
    """The line of a call; ``zero`` is the time that the file counts from."""
    operation, communicator, start, end, met, sequence, nbytes, peer, tag, _, error = call
    if sequence is None:
        kind, more = "message", f',"peer":{peer},"tag":{tag}'
    else:
        kind, more = "collective", f',"sequence":{sequence}'
        if peer != NOBODY:
            more += f',"root":{peer}'
        if met:
            more += f',"waited":{(met - start) * 1e6:.3f}'
    if error is not None:
        more += f',"error":{_quoted(error)}'
    # Three times as fast as json.dumps of a dict, and of all lines almost all are such.
    return (
        f'{{"name":{_quoted(operation)},"cat":"{kind}","ph":"X","pid":{rank},"tid":{thread},'
        f'"ts":{(start - zero) * 1e6:.3f},"dur":{(end - start) * 1e6:.3f},'
        f'"args":{{"communicator":{_quoted(communicator)},"bytes":{nbytes}{more}}}}},\n'
    )


@functools.cache
def _quoted(text: str) -> str:
    return json.dumps(text)


def metadata(event: str, rank: int, thread: int = 0, /, **said: Any) -> str:
    """The line of an event that has no time of its own."""
    return _line({"name": event, "ph": "M", "pid": rank, "tid": thread, "args": said})


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, separators=(",", ":")) + ",\n"

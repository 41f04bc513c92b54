"""Takes events of ranks, and reports of lost ranks by mpiexec, out of a job's output."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from _chainermn_events import MARK, MOST_BYTES, VERSION

# What begins like an event and is longer, with a tag before it, is none.
MAX_LINE_BYTES = MOST_BYTES + 512
# Before a rank's line, if asked for: MPICH's `[0] `; Open MPI's `[1,0]<stderr>: `, job
# and rank.
TAG = rb"(?:\[(?:[^\[\],\s]{0,200},)?\d{1,9}\](?:<std(?:out|err)>:)? ?)"
RANKS_LINE = re.compile(rb"^%s.*\n?" % TAG, re.MULTILINE)
# What is reported of a rank that ended badly: by MPICH's mpiexec; by Open MPI's, which
# breaks lines; and by Open MPI in a rank, after which its mpiexec may blame another.
REPORTS = [
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        r"^=   PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)\s+=   EXIT CODE: (?P<code>\d+)"
        r"(?:\s+=.*)*(?:\s+YOUR APPLICATION TERMINATED .* \(signal (?P<signal>\d+)\))?",
        r"process\s+rank\s+(?P<rank>\d+)\s+with\s+PID\s+(?P<pid>\d+)\s+on\s+node\s+"
        r"(?P<host>\S+)\s+exited\s+on\s+signal\s+(?P<signal>\d+)",
        r"Process name: \[[^\]]{1,200},(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)",
        r"\[(?P<host>[^][:\s]+):0*(?P<pid>\d+)\] Signal: .*\((?P<signal>\d+)\)",
    )
]


@dataclass(frozen=True)
class Event:
    """An event that a rank reported; docs/decisions/tools.md lists kinds and their fields."""

    rank: int
    kind: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)


class Decoder:
    """Takes the events out of a stream of mpiexec's output, and adds them to a list."""

    def __init__(self, job: str, events: list[Event]) -> None:
        self._events = events
        begin = rb"(?:%s)?%s" % (TAG, MARK.encode())
        event = rb"%s%s (\{[ -~]*\})\r?\n" % (begin, re.escape(job.encode()))
        self._line = re.compile(event, re.MULTILINE)
        # Also a tag alone: MPICH's mpiexec may write an event's separately.
        self._partial = re.compile(rb"%s|%s\Z" % (begin, TAG), re.MULTILINE)
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream, or none at its end; return what is to be shown."""
        shown = self._line.sub(self._take, self._pending + data)
        self._pending = b""
        begun = self._partial.search(shown, shown.rfind(b"\n") + 1)
        if begun and data and len(shown) - begun.start() <= MAX_LINE_BYTES:
            self._pending = shown[begun.start() :]
            shown = shown[: begun.start()]
        return shown

    def _take(self, line: re.Match[bytes]) -> bytes:
        """Add an event to the list; return what is shown in its place: nothing, if it is one."""
        try:
            event = json.loads(line[1])
            rank = int(event["rank"])
        except (KeyError, TypeError, ValueError):  # another rank's output got into it
            return line.group()
        if event.get("version") == VERSION:
            self._events.append(Event(rank, str(event.get("event")), event))
        return b""


@dataclass
class LostProcess:
    """A process that ended badly, as far as mpiexec reports it."""

    pid: int | None = None  # on its host
    rank: int | None = None
    host: str = ""  # as mpiexec calls it
    code: int | None = None  # its exit code, if it had one
    signal: int | None = None  # that ended it, if one did


def find_lost(output: bytes) -> list[LostProcess]:
    """Return what mpiexec reports, but not in lines that begin with a rank, in order."""
    text = RANKS_LINE.sub(b"", output).decode(errors="replace")
    found = [match for report in REPORTS for match in report.finditer(text)]
    found.sort(key=re.Match.start)
    return [_lost(**match.groupdict()) for match in found]


def _lost(host: str = "", **numbers: str | None) -> LostProcess:
    lost = LostProcess(host=host)
    for name, text in numbers.items():
        if text is not None:
            setattr(lost, name, int(text))
    return lost

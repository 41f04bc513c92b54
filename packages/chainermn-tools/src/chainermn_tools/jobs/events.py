"""Takes events of ranks, and reports of lost ranks by mpiexec, out of a job's output."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from _chainermn_events import MARK, MOST_BYTES, VERSION

# A line that begins like an event but is longer, with a tag before it, is no event.
MAX_LINE_BYTES = MOST_BYTES + 512
# The tag before a rank's line, if asked for: `[0] ` by MPICH; `[1,0]<stderr>: `, with
# the job and the rank, by Open MPI.
TAG = rb"(?:\[(?:[^\[\],\s]{0,200},)?\d{1,9}\](?:<std(?:out|err)>:)? ?)"
RANKS_LINE = re.compile(rb"^%s.*\n?" % TAG, re.MULTILINE)
# The reports of a rank that ended badly: by MPICH's mpiexec; by Open MPI's mpiexec,
# which breaks lines; and by Open MPI in a rank, after which its mpiexec may blame
# another rank.
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
        # Also a tag alone, because MPICH's mpiexec may write the tag before an event
        # separately.
        self._partial = re.compile(rb"%s|%s\Z" % (begin, TAG), re.MULTILINE)
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
        """Take the stream's next bytes, or none at its end; return the bytes to be shown."""
        shown = self._line.sub(self._take, self._pending + data)
        self._pending = b""
        begun = self._partial.search(shown, shown.rfind(b"\n") + 1)
        if begun and data and len(shown) - begun.start() <= MAX_LINE_BYTES:
            self._pending = shown[begun.start() :]
            shown = shown[: begun.start()]
        return shown

    def _take(self, line: re.Match[bytes]) -> bytes:
        """Add a line to the list if it is an event; return what to show: nothing for an event."""
        try:
            event = json.loads(line[1])
            rank = int(event["rank"])
        # Another rank's output got into the line.
        except (KeyError, TypeError, ValueError):
            return line.group()
        if event.get("version") == VERSION:
            self._events.append(Event(rank, str(event.get("event")), event))
        return b""


@dataclass
class LostProcess:
    """A process that ended badly, as far as mpiexec reports it."""

    pid: int | None = None  # its PID on its host
    rank: int | None = None
    host: str = ""  # the host, as mpiexec calls it
    code: int | None = None  # its exit code, if it had one
    signal: int | None = None  # the signal that ended the process, if any


def find_lost(output: bytes) -> list[LostProcess]:
    """Return mpiexec's reports in order, but none in a line that begins with a rank."""
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

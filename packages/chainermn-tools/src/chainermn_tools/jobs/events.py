"""Takes events of ranks, and reports of lost ranks by mpiexec, out of a job's output."""

from __future__ import annotations

import json
import re
import signal
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _chainermn_events import MARK, MOST_BYTES, VERSION

# What begins like an event and is longer, with a tag before it, is none.
MAX_LINE_BYTES = MOST_BYTES + 512
# Before a rank's line, if asked for: MPICH's `[0] `; Open MPI's `[1,0]<stderr>: `, job
# and rank; srun's `0: ` or ` 0: `.
TAG = rb"(?:\[(?:[^\[\],\s]{0,200},)?(\d{1,9})\](?:<std(?:out|err)>:)? ?|^ {0,9}(\d{1,9}): )"
OPEN_MPI_TAG = re.compile(rb"\[[^\[\],\s]{0,200},(\d{1,9})\]<std(?:out|err)>: ?")
SRUN_TAG = re.compile(rb"^ {0,9}(\d{1,9}): ", re.MULTILINE)
TAGGED = re.compile(rb"\[(\d{1,9})\] ?(.*)")
# What mpiexec reports of a rank that ended badly, MPICH's and then Open MPI's (which
# breaks lines); then what a rank's Open MPI prints of a signal, after which mpiexec may
# blame another.
HYDRA_LOST = re.compile(r"^=   PID (\d+) RUNNING AT (\S+)\s*$", re.M)
HYDRA_CODE = re.compile(r"^=   EXIT CODE: (\d+)\s*$", re.M)
HYDRA_SIGNAL = re.compile(r"^YOUR APPLICATION TERMINATED .* \(signal (\d+)\)", re.M)
PRTE_SIGNAL = re.compile(
    r"process\s+rank\s+(?P<rank>\d+)\s+with\s+PID\s+(?P<pid>\d+)\s+on\s+node\s+(?P<host>\S+)"
    r"\s+exited\s+on\s+signal\s+(?P<signal>\d+)"
)
OMPI_SIGNAL = re.compile(r"\[([^][:\s]+):0*(\d+)\] Signal: .*\((\d+)\)")
PRTE_CODE = re.compile(
    r"Process name: \[[^\]]{1,200},(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)"
)
SRUN_LOST = re.compile(r"^srun: error: (\S+): tasks? (\d+)[^:]*: ([^(\n]*\w)", re.M)
SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
# What Slurm says of a task that the kernel killed.
SIGNALS["Out Of Memory"] = signal.SIGKILL
TELLING = re.compile(rb"PID \d|EXIT CODE|Exit code|[Ss]ignal:? |^srun: error: ")
REPORT_LINE_BYTES, REPORT_LINES = 500, 3  # no report has longer lines, or more of them
MAX_REPORTS = 100


@dataclass(frozen=True)
class Event:
    """An event that a rank reported; docs/decisions/launch.md lists kinds and their fields."""

    rank: int
    kind: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields.get(name)


class Decoder:
    """Takes the events out of a stream of mpiexec's output, and adds them to a list."""

    def __init__(self, job: str, events: list[Event]) -> None:
        self._events = events
        mark = MARK.encode()
        self._line = re.compile(
            rb"(?:%s)?%s%s (\{[ -~]*\})\r?\n" % (TAG, mark, re.escape(job.encode())),
            re.M,
        )
        # Also a tag alone: MPICH's mpiexec may write an event's separately.
        self._partial = re.compile(rb"(?:%s)?%s|%s\Z" % (TAG, mark, TAG), re.M)
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes of the stream; return what is to be shown of them."""
        shown = self._line.sub(self._take, self._pending + data)
        begun = self._partial.search(shown, shown.rfind(b"\n") + 1)
        if begun is None or len(shown) - begun.start() > MAX_LINE_BYTES:
            self._pending = b""
            return shown
        self._pending = shown[begun.start() :]
        return shown[: begun.start()]

    def close(self) -> bytes:
        """Return what is left to be shown at the end of the stream."""
        pending, self._pending = self._pending, b""
        return pending

    def _take(self, line: re.Match[bytes]) -> bytes:
        """Add an event to the list; return what is shown in its place: nothing, if it is one."""
        try:
            event = json.loads(line.groups()[-1])
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


@dataclass
class LauncherReports:
    """Finds what mpiexec itself reports in a stream of its output."""

    # Whether lines of ranks begin with a tag, and so can't be taken for mpiexec's.
    tagged: bool
    lost: list[LostProcess] = field(default_factory=list)
    _line: bytes = b""
    _lines_to_search: int = 0
    _window: deque[str] = field(default_factory=lambda: deque(maxlen=REPORT_LINES))

    def feed(self, data: bytes) -> None:
        for piece in data.splitlines(keepends=True):
            self._line += piece[:REPORT_LINE_BYTES]
            if piece.endswith((b"\n", b"\r")):
                self._take(self._line)
                self._line = b""
            self._line = self._line[:REPORT_LINE_BYTES]

    def _take(self, line: bytes) -> None:
        if self.tagged and re.match(TAG, line):
            return
        self._window.append(line.decode(errors="replace"))
        if TELLING.search(line):
            self._lines_to_search = REPORT_LINES
        if self._lines_to_search and len(self.lost) < MAX_REPORTS:
            self._lines_to_search -= 1
            self._search("".join(self._window))

    def _search(self, text: str) -> None:
        if found := PRTE_SIGNAL.search(text):
            rank, pid, signal = (
                int(found["rank"]),
                int(found["pid"]),
                int(found["signal"]),
            )
            self.lost.append(LostProcess(pid, rank, found["host"], signal=signal))
        elif found := OMPI_SIGNAL.search(text):
            self.lost.append(
                LostProcess(int(found[2]), host=found[1], signal=int(found[3]))
            )
        elif found := PRTE_CODE.search(text):
            self.lost.append(
                LostProcess(rank=int(found["rank"]), code=int(found["code"]))
            )
        elif found := SRUN_LOST.search(text):
            code = found[3].removeprefix("Exited with exit code ")
            ended = (
                {"code": int(code)} if code.isdigit() else {"signal": SIGNALS.get(code)}
            )
            self.lost.append(LostProcess(rank=int(found[2]), host=found[1], **ended))
        elif found := HYDRA_LOST.search(text):
            self.lost.append(LostProcess(int(found[1]), host=found[2]))
        elif self.lost and (found := HYDRA_CODE.search(text)):
            self.lost[-1].code = int(found[1])
        elif self.lost and (found := HYDRA_SIGNAL.search(text)):
            self.lost[-1].signal = int(found[1])
        else:
            return
        self._window.clear()


def normalize_tags(shown: bytes, by_srun: bool = False) -> bytes:
    """Rewrite Open MPI's tags, or srun's, as MPICH writes them, `[0] `."""
    return (SRUN_TAG if by_srun else OPEN_MPI_TAG).sub(rb"[\1] ", shown)


def write_logs(folder: Path, shown: bytes) -> bytes:
    """Append lines to their ranks' files, `rank-0.log`; return an unfinished line that is left."""
    *lines, rest = shown.split(b"\n")
    for found in filter(None, map(TAGGED.match, lines)):
        with open(folder / f"rank-{int(found[1])}.log", "ab") as file:
            file.write(found[2] + b"\n")
    return rest

"""Finds in a log what the job says of its own end: which rank failed first, how, what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from _chainermn_verdict import users_lines
from chainermn_tools.explain.next_steps import next_step

LITERALS = (
    *("chainermn launch: ", "ChainerMN: ", "chainermn: a signal warned"),
    *(
        " noticed that process rank ",
        "Traceback (most recent call last)",
        "Fatal Python error: ",
    ),
    *(" EXIT STRING: ", "application called MPI_Abort("),
)
RANK = r"(?:rank (?P<rank>\d+)(?: on (?P<at>\S+)| of \d+:| \(process \d+ on (?P<host>\S+)\))? ?)"
CULPRIT = rf"(?:likely culprits?\b.*?: {RANK}?)?"
WHOLE_JOBS = (
    "ended by|all ranks|no rank|each of the|the job did|mpiexec doesn|"
    "ranks? [0-9, .]+of .* goodbye"
)
# By how much each says, the least number most.
FORMS = (
    (0, rf"chainermn launch: {RANK}failed first: (?P<how>.+)"),
    (0, rf"chainermn launch: the watchdog ended the job: {CULPRIT}(?P<how>.+)"),
    (0, rf"chainermn launch: (?P<how>(?:{WHOLE_JOBS}).*)"),
    (
        1,
        rf"ChainerMN: {RANK}(?P<how>(?:uncaught|sys\.exit|os\._exit).*), ending the job",
    ),
    (1, r"chainermn: (?P<how>a signal warned.*)"),
    (2, rf"ChainerMN: {RANK}(?P<how>is gone.*)"),
    (
        2,
        r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) (?P<how>exited) on",
    ),
    (
        3,
        rf"ChainerMN: (?=likely culprit|nothing was|all ranks are|ranks wait){CULPRIT}(?P<how>.+)",
    ),
    (4, r"EXIT STRING: (?P<what>[\w ]+) \((?P<how>signal (?!2\)|15\))\d+)\)"),
    (5, r"(?P<how>Traceback) \(most"),
    (
        6,
        r"(?P<how>application called MPI_Abort)\((?:comm|\w+, \d+\) - process (?P<rank>\d+))",
    ),
)
SIGNAL, TRACEBACK, ABORT = 4, 5, 6
# Of these the last one counts: a job starts again, and a call that waited for long may
# end.
LATER_IS_BETTER = (0, 3)
SECONDARY = re.compile(r"(?:uncaught |[\w.]+\.)(?:PeerError|Exception)\b")
RANKS_TAG = re.compile(r"\[(?:\S+,)?(\d+)\](?:<std\w+>:)? ?| *(\d+): ")
# Above a traceback that is a record of `logging`, and lines that may follow one that
# isn't.
LOGGED = re.compile(rb"\b(?:WARNING|ERROR|CRITICAL)\b.*\n\Z")
FEW_LINES = 4
RAISED = re.compile(r"[\w.]+(?::|\s*$)")  # the last line of a traceback
MPICH_LINES = 9  # from a job's own last line to the signal that MPICH's mpiexec names
CHAINED = re.compile(
    rb"(?:another exception occurred|cause of the following exception):"
)
TRACEBACK_BYTES = 1 << 15
NO_RANK = "the job"


@dataclass(frozen=True)
class Verdict:
    """What a log says of its job's end."""

    line: int  # of the log, from 1
    how: str  # what happened
    rank: int | None = None  # that failed first; None if it isn't named
    host: str = ""  # where that was, if it is named
    traceback: str = ""  # of an exception, if it is in the log

    @property
    def next_step(self) -> str:
        return next_step(self.how, *users_lines(self.traceback)[-1:])

    @property
    def headline(self) -> str:
        who = NO_RANK if self.rank is None else f"rank {self.rank}"
        return f"{who}{f' on {self.host}' if self.host else ''}: {self.how}"


class VerdictFinder:
    """Is given a log piece by piece, and remembers the best that it says."""

    def __init__(self) -> None:
        self._found: dict[int, Verdict] = {}  # by the numbers of FORMS
        self._tracebacks: dict[str, str] = {}  # by their last lines
        self._crash = ""  # as faulthandler prints it
        # The last traceback: its last line, whether it is kept, and whether it is a
        # log's record.
        self._ended, self._is_kept, self._logged = 0, False, False

    def verdict(self) -> Verdict | None:
        """Return what was found; None if the log says nothing of its job's end."""
        best = self._found[min(self._found)] if self._found else None
        if best and best.rank is None and best is self._found.get(TRACEBACK):
            best = replace(best, rank=self._found.get(ABORT, best).rank)
        is_crash = (
            best and self._crash and re.match("(is )?gone|ended by signal 11", best.how)
        )
        return replace(best, how=self._crash) if best and is_crash else best

    def end(self, last: int, is_echoed: bool, by_scheduler: bool) -> None:
        """Forget a traceback that ended nothing: the job went on, or a signal ended it."""
        goes_on = last > self._ended + (0 if self._logged else FEW_LINES)
        if ABORT in self._found:  # on which mpiexec kills the others
            self._found.pop(SIGNAL, None)
        signal, trace = self._found.get(SIGNAL), self._found.get(TRACEBACK)
        if signal and trace and signal.line < trace.line:  # of a run before
            del self._found[SIGNAL]
            signal = None
        if (
            signal
            and trace
            and not self._logged
            and signal.line <= self._ended + MPICH_LINES
        ):
            self._found[SIGNAL] = replace(signal, traceback=trace.traceback)
        if by_scheduler or signal or (goes_on and not is_echoed):
            self._found.pop(TRACEBACK, None)

    def take(self, line: int, text: str, before: bytes, after: bytes) -> None:
        """Take a line with one of the LITERALS, its number and what is around it."""
        if crash := re.search(r"Fatal Python error: (?:\[\d+\] )?([\w ]+)", text):
            self._crash = self._crash or f"Fatal Python error: {crash[1]}"
        for level, pattern in FORMS:
            said = re.search(pattern, text)
            if said is None:
                continue
            known = said.groupdict()
            how, trace, is_better = known["how"].rstrip(), "", level in LATER_IS_BETTER
            # As Open MPI's mpiexec says; on what signal is in the next line.
            if how == "exited":
                how = "is gone"
            if how == "Traceback":
                how, trace, length = _traceback(text[: said.start()], after)
                if not how:
                    return
                # What follows at once is another rank's.
                is_part = CHAINED.search(before.rpartition(b"Traceback (most")[2])
                is_better = self._is_kept if is_part else line > self._ended + 1
                self._logged = self._logged if is_part else bool(LOGGED.search(before))
                tag = RANKS_TAG.fullmatch(text[: said.start()])
                known["rank"] = tag and (tag[1] or tag[2])
                self._ended, self._is_kept = line + length, False
                self._tracebacks.setdefault(how, trace)
            elif level == SIGNAL:
                how = f"ended by {how} ({known['what']})"
            elif how.startswith("uncaught "):
                last = before.decode(errors="replace").rstrip().rpartition("\n")[2]
                how = next((it for it in self._tracebacks if last.endswith(it)), how)
            plain = re.sub(r" \(exit status \d+\)$", "", how)
            trace = trace or self._tracebacks.get(plain, "")
            earlier = self._found.get(level)
            if earlier and not is_better and not SECONDARY.match(earlier.how):
                return
            rank = int(known["rank"]) if known.get("rank") else None
            at = re.search(r" RUNNING AT (\S+)", before.decode(errors="replace"))
            ended_at = at[1] if at and level == SIGNAL else ""
            host = known.get("at") or known.get("host") or ended_at
            self._found[level], self._is_kept = (
                Verdict(line, how, rank, host, trace),
                True,
            )
            return


def _traceback(tag: str, after: bytes) -> tuple[str, str, int]:
    """Return a traceback's last line, all of it, and how far its end is, in lines."""
    kept: list[str] = []
    for at, line in enumerate(
        after[:TRACEBACK_BYTES].decode(errors="replace").splitlines()
    ):
        if at and RANKS_TAG.fullmatch(tag) and not line.startswith(tag.rstrip()):
            continue  # another rank's
        kept.append(line.removeprefix(tag))
        if at and not kept[-1].startswith(" "):
            if not RAISED.match(kept[-1]):
                # As of Chainer's trainer, which goes on with another one.
                break
            return kept[-1].rstrip(), "\n".join(kept), at
    return "", "", 0

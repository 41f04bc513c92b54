"""Finds in a log which rank failed first and how, as our own programs report it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import IntEnum

from _chainermn_verdict import users_lines
from chainermn_tools.explain.next_steps import next_step

NO_RANK = "the job"


class Speaker(IntEnum):
    """The programs that say why a job ended; the first one knows most."""

    LAUNCH = 0
    RANK = 1
    MONITOR = 2  # a rank is gone
    WATCHDOG = 3  # ranks wait for another rank


# For these the last verdict counts, since a job may start again, and a call that has
# waited long may end. For all others the first one counts.
REPEATED = (Speaker.LAUNCH, Speaker.WATCHDOG)
# A rank as ranks, the monitor and `chainermn launch` name it.
RANK = (
    r"(?:rank (?P<rank>\d+)(?: of \d+:)?"
    r"(?: \(process \d+)?(?: on (?P<host>[^\s)]+)\)?)? ?)"
)
CULPRIT = rf"(?:likely culprits?\b.*?: {RANK}?)?"
WHOLE_JOBS = (
    r"ended by|all ranks|no rank|each of the|the job did|"
    r"of \d+ ranks these ended"
)
FORMS = (
    (Speaker.LAUNCH, rf"chainermn launch: {RANK}failed first: (?P<how>.+)"),
    (
        Speaker.LAUNCH,
        rf"chainermn launch: the watchdog ended the job: {CULPRIT}(?P<how>.+)",
    ),
    (Speaker.LAUNCH, rf"chainermn launch: (?P<how>(?:{WHOLE_JOBS}).*)"),
    (
        Speaker.RANK,
        rf"ChainerMN: {RANK}(?P<how>(?:uncaught|sys\.exit|os\._exit).*), ending the job",
    ),
    (Speaker.RANK, r"chainermn: (?P<how>a signal warned.*)"),
    (Speaker.MONITOR, rf"ChainerMN: {RANK}(?P<how>is gone.*)"),
    (
        Speaker.WATCHDOG,
        "ChainerMN: (?=likely culprit|nothing was|all ranks are|ranks wait)"
        rf"{CULPRIT}(?P<how>.+)",
    ),
)
# Each line that matches one of the forms, or that reports a crash, contains one of
# these.
MARKS = ("chainermn launch: ", "ChainerMN: ", "chainermn: ", "Fatal Python error: ")
# What mpiexec, srun or `chainermn launch --prefix` put before a rank's lines.
TAG = re.compile(r"(?:\[(?:\S+,)?\d+\](?:<std\w+>:)? ?| *\d+: )?")
TAGS_RANK = re.compile(r"\d+(?=\]|: )")
TRACEBACK = "Traceback (most recent call last)"
# How a traceback begins without this title if a script can't be compiled, and how
# errors look.
UNTITLED = re.compile(r'  File "[^"]+", line \d+$')
ERROR = re.compile(r"[A-Za-z_][\w.]*(?:: |:?$)")
# How launchers begin to say that a rank failed, and say that it was killed.
ENDED = re.compile(
    "BAD TERMINATION|called MPI_Abort|MPI_ABORT was|exited with non-zero|"
    "due to process rank|job  terminated|srun: error"
)
KILLED = re.compile(r"EXIT STRING|slurmstepd: error|exited on signal")
# How a further line of an error's message begins: by a space, or by a label if the
# first line has no text, as in Chainer's InvalidType. Lines of Chainer's progress bar
# don't count.
FURTHER = re.compile(r" (?! *total +\[)|(?!ChainerMN|Fatal )[A-Z][\w ]*: ")
TEXTLESS = re.compile(r"^[\w.]+: *$", re.MULTILINE)
MESSAGE_CHARACTERS = 500  # as many as `chainermn launch` shows, on one line
MOST_TRACEBACKS = 1000
CRASHED = re.compile(r"(?:is )?gone|ended by signal 11")


def find_crash(text: str) -> str:
    """Return what faulthandler prints about a signal that ended a rank, or an empty text."""
    said = re.search(r"Fatal Python error: (?:\[\d+\] )?([\w ]+)", text)
    if said is None:
        return ""
    return f"Fatal Python error: {said[1]}"


@dataclass(frozen=True)
class Verdict:
    """Which rank of a job failed first, and how."""

    line: int  # of the log, from 1
    how: str  # what happened
    rank: int | None = None  # the rank that failed first; None if none is named
    host: str = ""  # where the rank ran, if named
    traceback: str = ""  # the traceback of an exception, if the log has it

    @property
    def next_step(self) -> str:
        place = users_lines(self.traceback)[-1:]
        return next_step(self.how, *place)

    @property
    def headline(self) -> str:
        who = NO_RANK
        if self.rank is not None:
            who = f"rank {self.rank}"
        if self.host:
            who = f"{who} on {self.host}"
        return f"{who}: {self.how}"

    @property
    def is_by_signal(self) -> bool:
        return self.how.startswith(("is gone", "gone", "ended by", "Fatal Python"))


class VerdictFinder:
    """Reads a log line by line, and remembers the best verdict."""

    def __init__(self) -> None:
        self._verdicts: dict[Speaker, Verdict] = {}
        self._crash = ""  # the first crash, as faulthandler prints it
        # Tracebacks by their last lines, which name the error; the latest one is last.
        self.tracebacks: dict[str, str] = {}
        # Verdicts after which a rank was silent, by tag.
        self._final: dict[str, Verdict] = {}
        self._passed = 0  # the last line that shows that the job went on
        self.ended = False  # whether the launcher says that a rank failed
        self._unfinished: dict[str, list[str]] = {}  # their lines so far, by tag

    @property
    def verdict(self) -> Verdict | None:
        """The best verdict so far: by our programs, or the traceback at the end; None if none."""
        if not self._verdicts:
            for final in self._final.values():
                if self.ended or final.line > self._passed:
                    return final
            return None
        best = self._verdicts[min(self._verdicts)]
        if self._crash and CRASHED.match(best.how):
            best = replace(best, how=self._crash)
        return best

    def take(self, number: int, line: str) -> bool:
        """Take the next line and its number; return whether it's part of a traceback."""
        tag = ""
        if said := TAG.match(line):
            tag = said[0]
        text = line[len(tag) :]
        if any(mark in text for mark in MARKS):
            self._take_report(number, text)
        return self._take_traceback(number, tag, text)

    def _take_report(self, number: int, text: str) -> None:
        self._crash = self._crash or find_crash(text)
        for speaker, form in FORMS:
            if said := re.search(form, text):
                self._take_verdict(speaker, number, said.groupdict())
                return

    def _take_verdict(
        self, speaker: Speaker, number: int, said: dict[str, str | None]
    ) -> None:
        earlier = self._verdicts.get(speaker)
        if earlier and speaker not in REPEATED and "PeerError" not in earlier.how:
            return

        how = (said["how"] or "").rstrip()
        if how.startswith("uncaught "):
            how = self._error_of(how.removeprefix("uncaught "))
        rank = None
        if said.get("rank"):
            rank = int(said["rank"] or 0)
        # Without the further lines of its message, or the exit status.
        errors = filter(how.startswith, self.tracebacks)
        error = max(errors, key=len, default="")
        self._verdicts[speaker] = Verdict(
            line=number,
            how=how,
            rank=rank,
            host=said.get("host") or "",
            traceback=self.tracebacks.get(error, ""),
        )

    def _error_of(self, kind: str) -> str:
        """Return the last line of the latest traceback of an error of this class."""
        for error in reversed(self.tracebacks):
            if re.match(rf"(?:[\w.]+\.)?{kind}(?::|$)", error):
                return error
        return f"uncaught {kind}"

    def _take_traceback(self, number: int, tag: str, text: str) -> bool:
        lines = self._unfinished.get(tag)
        if text.startswith(TRACEBACK) or (lines is None and UNTITLED.match(text)):
            self._unfinished[tag] = [text]
            return True
        if lines is None:
            return self._take_output(number, tag, text)
        lines.append(text)
        if not text.startswith(" "):
            del self._unfinished[tag]
            self._finish_traceback(number, tag, text, "\n".join(lines))
        return True

    def _finish_traceback(
        self, number: int, tag: str, error: str, traceback: str
    ) -> None:
        error = " ".join(error.split())[:MESSAGE_CHARACTERS]
        self.tracebacks.pop(error, None)  # so that the entry comes last
        self.tracebacks[error] = traceback
        if len(self.tracebacks) > MOST_TRACEBACKS:
            del self.tracebacks[next(iter(self.tracebacks))]
        if not self.ended and ERROR.match(error):
            verdict = Verdict(line=number, how=error, traceback=traceback)
            if named := TAGS_RANK.search(tag):
                verdict = replace(verdict, rank=int(named[0]))
            self._final[tag] = verdict

    def _take_output(self, number: int, tag: str, text: str) -> bool:
        """Take a line after tracebacks; return whether it belongs to an error's message."""
        if KILLED.search(text):
            self._final.clear()
        if ENDED.search(text):
            self.ended = True
        # The outputs of several ranks may be mixed.
        mixed = text.strip("=-")
        if self.ended or any(mixed in each.traceback for each in self._final.values()):
            return False
        final = self._final.get(tag)
        if final and _is_message(text, final):
            self.tracebacks.pop(final.how, None)
            how = f"{final.how} {text}"
            self._finish_traceback(final.line, tag, how, f"{final.traceback}\n{text}")
            return True
        self._final.pop(tag, None)
        self._passed = number
        return False


def _is_message(text: str, error: Verdict) -> bool:
    """Return whether a line that follows an error goes on with its message."""
    if len(error.how) == MESSAGE_CHARACTERS or not FURTHER.match(text):
        return False
    return text.startswith(" ") or bool(TEXTLESS.search(error.traceback))

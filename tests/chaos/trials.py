"""A trial: the job of a case, the job that goes on from it, and what of both is not as promised."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import runs
from .faults import ENDING, STOP, Case
from .judging import wrong
from .runs import Ground, Here, Hosts, Seen, read_status

# CHAINERMN_TIMEOUT of the jobs that are to fail; the others take their time.
LIMIT_SECONDS = 5.0
PATIENT_SECONDS = 60.0
# What must not take longer, in seconds. After a cut 20 are for the silence to be no
# hiccup; then come the monitor's, the launcher's and MPI's own ends.
DEATH = "a rank's death to the end of the job"
REPORT = "a stall's time-out to the report"
CUT = "the cut of a link to the end of the job"
MOST_SECONDS = {DEATH: 5.0, REPORT: 3.0, CUT: 40.0}
# What must not be, and, of reports that are wrong, at most one in fifty.
UNENDED, MISNAMED, LEFT, LOST = "DIDN'T END", "MISNAMED", "LEFT", "LOST"
NAMED_SHARE = 0.98


@dataclass
class Trial:
    """What came of a case; `seconds` and `wrongs` by the names above."""

    case: Case
    seen: Seen
    happened: bool = True  # at a random time the job may have been faster
    seconds: dict[str, float] = field(default_factory=dict)
    wrongs: dict[str, str] = field(default_factory=dict)
    left: int = 0  # things that the job left behind
    load: float = 0.0  # of the machine in the last minute, per core

    def __repr__(self) -> str:  # what a failing assertion shows
        said = f"-- out:\n{self.seen.out}\n-- err:\n{self.seen.err}"
        return f"{self.case}: {self.summary()}\n{said}"

    def summary(self) -> str:
        """In a line."""
        parts = (
            [f"status {self.seen.returncode}"]
            if self.happened
            else ["the job was faster"]
        )
        parts += [
            f"{seconds:.2f} s from {what}" for what, seconds in self.seconds.items()
        ]
        wrongs = [f"{name}: {text}" for name, text in self.wrongs.items()]
        return ", ".join([*parts, f"load {self.load:.1f}", *wrongs])


@contextlib.contextmanager
def made_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="chainermn-chaos-") as folder:
        for name in ("out", "status", "tmp"):
            Path(folder, name).mkdir()
        yield Path(folder)


class Trials:
    """Tries cases, and remembers what unbroken jobs end with."""

    def __init__(self, hosts: Hosts | None = None) -> None:
        """Use these hosts for the cases that need any, or have two."""
        self._hosts = hosts
        self._whole: dict[tuple[int, str, int], tuple[dict[str, str], float]] = {}
        self._ground: Ground = hosts or Here()

    def run(self, case: Case, restart: bool = True) -> Trial:
        """Try a case.

        Args:
            case: what to try.
            restart: whether to go on from its checkpoints, and compare the end.
        """
        assert self._hosts or (case.hosts == 1 and case.kind != "disk")
        after = 0.0 if case.moment else case.after * self._unbroken(case)[1]
        with made_folder() as folder, contextlib.ExitStack() as stack:
            if self._hosts:
                stack.enter_context(self._hosts.made_for(case.kind, folder / "out"))
            try:
                seen = runs.run(case, self._ground, folder, LIMIT_SECONDS, after)
            finally:
                if self._hosts:
                    self._hosts.link("up")
            trial = judged(case, seen)
            left = seen.left
            if not trial.happened:
                lost = (
                    "" if seen.ends == self._unbroken(case)[0] else "it ended otherwise"
                )
            elif restart:
                lost, more = self._lost(case, folder)
                left = left + more
            else:
                lost = ""
        trial.left = len(left)
        found = {LEFT: "; ".join(left), LOST: lost}
        trial.wrongs.update({name: text for name, text in found.items() if text})
        return trial

    def _unbroken(self, case: Case) -> tuple[dict[str, str], float]:
        """What the ranks of an unbroken job of that kind end with, and its seconds."""
        key = case.ranks, case.communicator, case.hosts
        if key not in self._whole:
            with made_folder() as folder:
                seen = runs.run(case, self._ground, folder, PATIENT_SECONDS)
                assert seen.returncode == 0, (
                    f"an unbroken job failed\n{seen.out}{seen.err}"
                )
                lengths = [
                    float(path.read_text()) for path in folder.glob("status/length.*")
                ]
            self._whole[key] = seen.ends, max(lengths)
        return self._whole[key]

    def _lost(self, case: Case, folder: Path) -> tuple[str, list[str]]:
        """What is wrong with what goes on from the checkpoints, and what that leaves."""
        out = self._ground.seen(folder / "out")
        committed = int(read_status(folder, "committed") or 0)
        again = runs.run(case, self._ground, folder, PATIENT_SECONDS)
        if again.returncode != 0:
            said = f"status {again.returncode}\n{again.out}{again.err}"
            return f"it can't be started again: {said}", []
        begin = int(again.out.partition("BEGIN ")[2].split()[0])
        # When all is trained the checkpoints are removed.
        if begin < committed < STOP:
            return f"it goes on from {begin} though {committed} was committed", []
        if again.ends != self._unbroken(case)[0]:
            return f"going on from {begin} it ends otherwise than an unbroken job", []
        return "", again.left + [str(path) for path in sorted(out.iterdir())]


def judged(case: Case, seen: Seen) -> Trial:
    """The trial, as far as its first job tells."""
    trial = Trial(case, seen, load=os.getloadavg()[0] / (os.cpu_count() or 1))
    # An exception that is raised in a finalizer, where Python ignores all, is no fault;
    # nor is a lack of memory that is met in allocating what the job can do without, and
    # says so.
    words = {
        "exception": "Exception ignored in",
        "memory": "memory could not be allocated",
    }
    ignored = words.get(case.kind, "\0") in seen.err
    if case.moment is None and seen.returncode == 0 and (seen.fault is None or ignored):
        trial.happened = False
        return trial
    if seen.returncode in (0, None):
        trial.wrongs[UNENDED] = "by itself, non-zero"
    if seen.fault is None:
        trial.wrongs[MISNAMED] = "the fault never came"
        return trial
    if case.group in ("end", *ENDING):
        trial.seconds[DEATH] = seen.ended - seen.fault
    if case.group == "stall" and seen.reported is not None:
        trial.seconds[REPORT] = max(0.0, seen.reported - seen.fault - LIMIT_SECONDS)
    if seen.cut is not None:
        trial.seconds[CUT] = seen.ended - seen.cut
    if complaint := wrong(case, seen):
        trial.wrongs[MISNAMED] = complaint
    return trial


def figures(trials: Sequence[Trial]) -> list[tuple[str, str, str, bool]]:
    """What the project promises, what it was in these trials, what it must be, if it holds."""
    left, lost = (
        sum(trial.left for trial in trials),
        sum(LOST in trial.wrongs for trial in trials),
    )
    happened = [trial for trial in trials if trial.happened]
    number = len(happened)
    ended = sum(UNENDED not in trial.wrongs for trial in happened)
    named = sum(MISNAMED not in trial.wrongs for trial in happened)
    rows = [
        (
            "jobs that end by themselves, non-zero",
            f"{ended} of {number}",
            "all",
            ended == number,
        )
    ]
    for what, most in MOST_SECONDS.items():
        took = sorted(
            trial.seconds[what] for trial in happened if what in trial.seconds
        )
        middle = f"median {took[len(took) // 2]:.2f} s" if took else "none"
        longest = max(took, default=0.0)
        was = f"at most {longest:.2f} s ({middle}, {len(took)} times)"
        rows.append((f"time from {what}", was, f"at most {most:g} s", longest <= most))
    return [
        *rows,
        (
            "reports that name the right rank and operation",
            f"{named} of {number} ({named / max(1, number):.1%})",
            f"at least {NAMED_SHARE:.0%}",
            named >= NAMED_SHARE * number,
        ),
        ("left-over processes, segments, files", str(left), "0", left == 0),
        ("committed checkpoints lost or resumed wrong", str(lost), "0", lost == 0),
    ]

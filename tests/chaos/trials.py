"""A trial: the job of a case, the job that goes on from it, and what of both is not as promised."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.support.hosts.virtual_hosts import Cluster

from . import runs
from .faults import EARLY, STOP, Case
from .judging import wrong
from .runs import HOSTS, Seen

# CHAINERMN_TIMEOUT of the jobs that are to fail; the others take their time.
LIMIT_SECONDS = 5.0
PATIENT_SECONDS = 60.0
# What must not take longer, in seconds. After a cut 20 are for the silence to be no
# hiccup; then come the monitor's, the launcher's and MPI's own ends.
DEATH = "time from a rank's death to the end of the job"
REPORT = "time from a stall's time-out to the report"
CUT = "time from the cut of a link to the end of the job"
MOST_SECONDS = {DEATH: 5.0, REPORT: 3.0, CUT: 40.0}
# What must not be, and the share of the trials in which it may.
UNENDED = "jobs that don't end by themselves, non-zero"
MISNAMED = "reports that don't name the right rank and operation"
LEFT = "jobs that leave processes, segments or files"
LOST = "committed checkpoints lost or resumed wrong"
BESIDE = "jobs that are ended beside disturbed monitors"
MOST_WRONG = {UNENDED: 0.0, MISNAMED: 0.02, LEFT: 0.0, LOST: 0.0, BESIDE: 0.0}
DISK = "size=1m"
# What a report says next.
WAITED = r"likely culprit.*\n.* has waited for ([\d.]+) s"


@dataclass
class Trial:
    """What came of a case; `seconds` and `wrongs` by the names above."""

    case: Case
    seen: Seen
    happened: bool = True  # at a random time the job may have been faster
    seconds: dict[str, float] = field(default_factory=dict)
    wrongs: dict[str, str] = field(default_factory=dict)


@contextmanager
def folder_of(case: Case, cluster: Cluster):
    """A folder of a job, whose checkpoints lie on a small disk if the case fills it."""
    with (
        tempfile.TemporaryDirectory(prefix="chainermn-chaos-") as name,
        ExitStack() as undo,
    ):
        folder = Path(name)
        for part in ("out", "status", "tmp"):
            (folder / part).mkdir()
        if case.kind == "disk":
            out = folder / "out"
            cluster.run(HOSTS[0], "mount", "-t", "tmpfs", "-o", DISK, "tmpfs", out)
            undo.callback(cluster.run, HOSTS[0], "umount", "-l", out)
        yield folder


class Trials:
    """Tries cases, and remembers what unbroken jobs end with."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._whole: dict[tuple[int, str, int], tuple[dict[str, str], float]] = {}

    def run(self, case: Case, restart: bool = True) -> Trial:
        """Try a case.

        Args:
            case: what to try.
            restart: whether to go on from its checkpoints, and compare the end.
        """
        after = 0.0
        if case.moment is None:
            after = case.after * self._unbroken(case)[1]
        with folder_of(case, self._cluster) as folder:
            seen = runs.run(case, self._cluster, folder, LIMIT_SECONDS, after)
            self._cluster.run(HOSTS[1], "ip", "link", "set", "eth0", "up")
            trial = judged(case, seen)
            left = list(seen.left)
            if not trial.happened:
                if seen.ends != self._unbroken(case)[0]:
                    trial.wrongs[LOST] = "it ended otherwise"
            elif restart and case.moment not in EARLY:
                again = runs.run(case, self._cluster, folder, PATIENT_SECONDS)
                left += again.left
                if complaint := self._lost(case, seen, again):
                    trial.wrongs[LOST] = complaint
                else:  # all is trained, and the checkpoints are removed
                    left += self._cluster.run(HOSTS[0], "ls", folder / "out").split()
        if left:
            trial.wrongs[LEFT] = "; ".join(left)
        return trial

    def _unbroken(self, case: Case) -> tuple[dict[str, str], float]:
        """What the ranks of an unbroken job of that kind end with, and its seconds."""
        key = case.ranks, case.communicator, case.hosts
        if key not in self._whole:
            with folder_of(case, self._cluster) as folder:
                seen = runs.run(case, self._cluster, folder, PATIENT_SECONDS)
            assert seen.job.returncode == 0, seen
            lengths = map(float, seen.printed(r"END \d+ \w+ (\S+)"))
            self._whole[key] = seen.ends, max(lengths)
        return self._whole[key]

    def _lost(self, case: Case, seen: Seen, again: Seen) -> str:
        """What is wrong with what went on from the checkpoints."""
        if again.job.returncode != 0:
            return f"it can't be started again: {again}"
        begin = int(again.printed(r"BEGIN (\d+)")[0])
        committed = max(map(int, seen.printed(r"COMMITTED (\d+)")), default=0)
        # When all is trained the checkpoints are removed.
        if begin < committed < STOP:
            return f"it goes on from {begin} though {committed} was committed"
        if again.ends != self._unbroken(case)[0]:
            return f"going on from {begin} it ends otherwise than an unbroken job"
        return ""


def judged(case: Case, seen: Seen) -> Trial:
    """The trial, as far as its first job tells."""
    trial = Trial(case, seen)
    # An exception that is raised in a finalizer, where Python ignores all, is no fault;
    # nor is a lack of memory that is met in allocating what the job can do without, and
    # says so.
    words = {
        "exception": "Exception ignored in",
        "memory": "memory could not be allocated",
    }
    ignored = words.get(case.kind, "\0") in seen.job.err
    status = seen.job.returncode
    if case.moment is None and status == 0 and (seen.fault is None or ignored):
        trial.happened = False
        return trial
    if status in (0, None):
        trial.wrongs[UNENDED] = f"status {status}"
    if seen.fault is None:
        trial.wrongs[MISNAMED] = "the fault never came"
        return trial
    if complaint := wrong(case, seen):
        trial.wrongs[MISNAMED] = complaint
    if case.group in ("end", "signal", "warning"):
        trial.seconds[DEATH] = seen.job.ended - seen.fault
    if case.group == "stall" and (waited := re.search(WAITED, seen.job.err)):
        trial.seconds[REPORT] = float(waited[1]) - LIMIT_SECONDS
    if seen.cut is not None:
        trial.seconds[CUT] = seen.job.ended - seen.cut
    return trial


class Figure(NamedTuple):
    """What the project promises, what it was in some trials, and the most it may be."""

    name: str
    was: str
    most: str
    holds: bool


def figures(trials: Sequence[Trial]) -> list[Figure]:
    happened = [trial for trial in trials if trial.happened]
    number = len(happened)
    found = []
    for name, share in MOST_WRONG.items():
        count = sum(name in trial.wrongs for trial in trials)
        holds = count <= share * number
        found.append(Figure(name, f"{count} of {number}", f"{share:.0%}", holds))
    for name, most in MOST_SECONDS.items():
        took = [trial.seconds[name] for trial in happened if name in trial.seconds]
        was = "never"
        if took:
            was = f"{max(took):.2f} s, median {median(took):.2f} s, {len(took)} times"
        holds = max(took, default=0.0) <= most
        found.append(Figure(name, was, f"{most:g} s", holds))
    return found

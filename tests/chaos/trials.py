"""A trial: the job of a case, the job that goes on from it, and what of both is not as promised."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from . import runs
from .cases import DEATHS, STALLS, STOP, Case
from .grounds import Ground, Here
from .words import wrong

# CHAINERMN_TIMEOUT of the jobs that are to fail; the others take their time.
LIMIT_SECONDS = 5.0
PATIENT_SECONDS = 60.0


@dataclass
class Trial:
    """What came of a case.

    Attributes:
        case: which.
        seen: its job.
        happened: whether the fault came; at a random time the job may have been faster.
        ended: whether the job ended by itself, non-zero.
        death_seconds: from a rank's death to the end of the job.
        report_seconds: from the end of a stall's time to the report.
        cut_seconds: from the cut of a link to the end of the job.
        misnamed: what is missing of the right rank and operation; "" for nothing.
        left: what the job left behind.
        lost: what is wrong with the checkpoints, or with what goes on from them.
        load: of the machine in the last minute, per core.
    """

    case: Case
    seen: runs.Seen
    happened: bool = True
    ended: bool = True
    death_seconds: float | None = None
    report_seconds: float | None = None
    cut_seconds: float | None = None
    misnamed: str = ""
    left: list[str] = field(default_factory=list)
    lost: str = ""
    load: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether all but the times is as promised."""
        return self.ended and not (self.misnamed or self.left or self.lost)

    def __repr__(self) -> str:  # what a failing assertion shows
        said = f"-- out:\n{self.seen.out}\n-- err:\n{self.seen.err}"
        return f"{self.case}: {self.summary()}\n{said}"

    def summary(self) -> str:
        """In a line."""
        if not self.happened:
            return "the job was faster" if not self.lost else f"WRONG: {self.lost}"
        parts = [f"status {self.seen.returncode}"]
        if self.death_seconds is not None:
            parts.append(f"ended after {self.death_seconds:.2f} s")
        if self.report_seconds is not None:
            parts.append(f"reported after {self.report_seconds:.2f} s")
        if self.cut_seconds is not None:
            parts.append(f"ended {self.cut_seconds:.2f} s after the cut")
        parts += [f"load {self.load:.1f}"]
        wrongs = {
            "DIDN'T END": "" if self.ended else "by itself, non-zero",
            "MISNAMED": self.misnamed,
            "LEFT": "; ".join(self.left),
            "LOST": self.lost,
        }
        return ", ".join(parts + [f"{name}: {text}" for name, text in wrongs.items() if text])


class Trials:
    """Tries cases, and remembers what unbroken jobs end with."""

    def __init__(self, hosts: Ground | None = None) -> None:
        """Use these hosts for the cases that need any, or have two."""
        self._hosts = hosts
        self._whole: dict[tuple[int, str, int], tuple[dict[str, str], float]] = {}

    def ground(self, case: Case) -> Ground:
        """Where the case's job runs."""
        if self._hosts is None:
            assert case.hosts == 1
            assert case.kind != "disk"
            return Here()
        return self._hosts

    def run(self, case: Case, restart: bool = True) -> Trial:
        """Try a case.

        Args:
            case: what to try.
            restart: whether to go on from its checkpoints, and compare the end.
        """
        ground = self.ground(case)
        length = self.whole(case)[1] if case.moment is None else 0.0
        fault = {
            "kind": case.kind,
            "moment": case.moment,
            "rank": case.victim,
            "iteration": case.iteration,
            "after": case.after * length,
        }
        with _folders() as folders, _disk(case, ground, folders.out):
            try:
                seen = runs.run(case, ground, folders, fault, LIMIT_SECONDS)
            finally:
                ground.mend()
            trial = Trial(case, seen, load=os.getloadavg()[0] / (os.cpu_count() or 1))
            _judge(trial)
            if restart or not trial.happened:
                trial.lost = self._lost(trial, ground, folders)
        return trial

    def whole(self, case: Case) -> tuple[dict[str, str], float]:
        """What the ranks of an unbroken job of that kind end with, and its seconds."""
        key = case.ranks, case.communicator, case.hosts
        if key not in self._whole:
            with _folders() as folders:
                seen = runs.run(case, self.ground(case), folders, None, PATIENT_SECONDS)
            assert seen.returncode == 0, f"an unbroken job failed\n{seen.out}{seen.err}"
            self._whole[key] = ends_of(seen), max(seen.lengths)
        return self._whole[key]

    def _lost(self, trial: Trial, ground: Ground, folders: runs.Folders) -> str:
        """What is wrong with the checkpoints, or with what goes on from them."""
        case, whole = trial.case, self.whole(trial.case)[0]
        if not trial.happened:
            return "" if ends_of(trial.seen) == whole else "it ended otherwise than an unbroken job"
        out = ground.seen(folders.out)
        records = [path.suffix[1:] for path in out.glob("run.commit.*")]
        committed = max(
            [int(folders.noted("committed") or 0), *map(int, filter(str.isdigit, records))]
        )
        again = runs.run(case, ground, folders, None, PATIENT_SECONDS)
        if again.returncode != 0:
            return f"it can't be started again: status {again.returncode}\n{again.out}{again.err}"
        begin = int(again.out.partition("BEGIN ")[2].split()[0])
        # When all is trained the checkpoints are removed.
        if begin < committed < STOP:
            return f"it goes on from {begin} though {committed} was committed"
        if ends_of(again) != whole:
            return f"going on from {begin} it ends otherwise than an unbroken job"
        trial.left += again.left + [str(path) for path in sorted(out.iterdir())]
        return ""


def ends_of(seen: runs.Seen) -> dict[str, str]:
    """What each rank ended with."""
    lines = [line.split() for line in seen.out.splitlines() if line.startswith("END ")]
    return {rank: digest for _, rank, digest in lines}


def _judge(trial: Trial) -> None:
    seen, case = trial.seen, trial.case
    trial.left = list(seen.left)
    # An exception that is raised in a finalizer, where Python ignores all, is no fault.
    ignored = case.kind == "exception" and "Exception ignored in" in seen.err
    if case.moment is None and seen.returncode == 0 and (seen.fault is None or ignored):
        trial.happened = False
        return
    trial.ended = seen.returncode not in (0, None)
    if seen.fault is None:
        trial.misnamed = "the fault never came"
        return
    if case.kind in DEATHS:
        trial.death_seconds = seen.ended - seen.fault
    if case.kind in STALLS and seen.reported is not None:
        trial.report_seconds = max(0.0, seen.reported - seen.fault - LIMIT_SECONDS)
    if seen.cut is not None:
        trial.cut_seconds = seen.ended - seen.cut
    trial.misnamed = wrong(case, seen)


@contextlib.contextmanager
def _folders() -> Iterator[runs.Folders]:
    with tempfile.TemporaryDirectory(prefix="chainermn-chaos-") as folder:
        yield runs.Folders(Path(folder)).make()


def _disk(case: Case, ground: Ground, folder: Path) -> contextlib.AbstractContextManager[None]:
    return ground.disk(folder) if case.kind == "disk" else contextlib.nullcontext()

"""Runs a case's job to its end, and looks at what happens meanwhile and what is left."""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.support import jobs

from .cases import STOP, Case
from .grounds import Ground, all_variables, is_monitor, settings

LOOK_SECONDS = 0.02
# How often it is looked which files are mapped, of a job on a machine that others use.
MAPS_SECONDS = 0.2
# Ends a job that doesn't end by itself, which is a failure.
JOB_SECONDS = 300.0
# For what a job leaves behind to go: the monitor waits for the launcher to end what is its own.
GRACE_SECONDS = 60.0
REPORT = "ChainerMN: likely culprit"


@dataclass
class Seen:
    """A job that has been run.

    Attributes:
        returncode: of its launcher; None if it had to be ended.
        out: what it printed, with the stacks of all ranks if it had to be ended.
        err: the same.
        pids: of the ranks, by number.
        fault: when the fault came, by `time.time()`; None if it didn't.
        cut: when the link was cut; None if it wasn't.
        reported: when the watchdog's report came; None if none did.
        ended: when the launcher had ended.
        left: processes, segments, sockets and files that were still there a moment later.
        lengths: seconds from the communicator to the end, of ranks that came so far.
    """

    returncode: int | None = None
    out: str = ""
    err: str = ""
    pids: dict[int, int] = field(default_factory=dict)
    fault: float | None = None
    cut: float | None = None
    reported: float | None = None
    ended: float = 0.0
    left: list[str] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Folders:
    """What a job and the one that goes on from it have in common."""

    root: Path

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def notes(self) -> Path:
        return self.root / "notes"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    def make(self) -> Folders:
        for folder in (self.out, self.notes, self.temporary):
            folder.mkdir(parents=True)
        return self

    def noted(self, name: str) -> float | None:
        try:
            return float((self.notes / name).read_text())
        except FileNotFoundError:
            return None


def run(
    case: Case,
    ground: Ground,
    folders: Folders,
    fault: dict[str, Any] | None,
    seconds: float,
) -> Seen:
    """Run the job of a case.

    Args:
        case: which job.
        ground: where.
        folders: of the job.
        fault: see `planting`; None for none.
        seconds: CHAINERMN_TIMEOUT.
    """
    orders = {
        "communicator": case.communicator,
        "stop": STOP,
        "background": case.background,
        "out": str(folders.out),
        "notes": str(folders.notes),
        "fault": fault,
    }
    file = folders.root / "orders.json"
    file.write_text(json.dumps(orders))
    mark = secrets.token_hex(8)
    added = settings(mark, folders.temporary, seconds)
    for note in folders.notes.glob("rank.*"):
        note.unlink()
    seen = Seen()
    with (folders.root / "stdout").open("wb") as out, (folders.root / "stderr").open("wb") as err:
        process = subprocess.Popen(
            ground.command(case, file, added),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=folders.root,
            env=all_variables(added),
            start_new_session=True,
        )
    try:
        mapped = _follow(process, ground, folders, seen)
        if seen.returncode is None:
            jobs.end(process, ground.processes(mark, []))
    except BaseException:
        jobs.end(process, ground.processes(mark, []))
        raise
    _read(folders, seen)
    seen.left = _left(ground, mark, folders, seen, mapped)
    return seen


def _follow(
    process: subprocess.Popen[bytes], ground: Ground, folders: Folders, seen: Seen
) -> set[str]:
    """Wait for the job's end; the names in /dev/shm that its processes had mapped."""
    mapped: set[str] = set()
    deadline, looked = time.monotonic() + JOB_SECONDS, 0.0
    while (returncode := process.poll()) is None and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        if seen.reported is None and REPORT in _text(folders.root / "stderr"):
            seen.reported = time.time()
        if (folders.notes / "fault").exists() and not (folders.notes / "cut").exists():
            wanted = json.loads((folders.root / "orders.json").read_text())["fault"]
            if wanted is not None and wanted["kind"] == "link":
                ground.cut()
                (folders.notes / "cut").write_text(f"{time.time()}")
        if not ground.hosts and time.monotonic() - looked > MAPS_SECONDS:
            mapped |= _mapped(process.pid)
            looked = time.monotonic()
    seen.returncode, seen.ended = returncode, time.time()
    return mapped


def _mapped(launcher: int) -> set[str]:
    found: set[str] = set()
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines():
                    if "/dev/shm/" in line and not line.endswith("(deleted)"):
                        found.add(line.partition("/dev/shm/")[2])
    return found


def _read(folders: Folders, seen: Seen) -> None:
    seen.out, seen.err = _text(folders.root / "stdout"), _text(folders.root / "stderr")
    seen.fault, seen.cut = folders.noted("fault"), folders.noted("cut")
    if seen.reported is None and REPORT in seen.err:
        seen.reported = seen.ended
    for path in folders.notes.glob("rank.*"):
        seen.pids[int(path.suffix[1:])] = int(path.read_text().split()[1])
    seen.lengths = [float(path.read_text()) for path in folders.notes.glob("length.*")]


def _left(ground: Ground, mark: str, folders: Folders, seen: Seen, mapped: set[str]) -> list[str]:
    """What is left when all had a moment to go; processes are then ended."""
    deadline = time.monotonic() + GRACE_SECONDS

    def processes() -> list[psutil.Process]:
        return ground.processes(mark, list(seen.pids.values()))

    def all_that_is_left() -> list[str]:
        found = [*ground.shared(mapped), *ground.sockets()]
        found += [_described(process) for process in processes()]
        return found + [str(path) for path in sorted(folders.temporary.rglob("*"))]

    while (left := all_that_is_left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in processes():
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGKILL)
    for name in ground.shared(mapped):
        ground.remove(name)
    return left


def _described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        what = "a monitor" if is_monitor(words) else " ".join(words)[:200]
        return f"process {process.pid} ({process.status()}): {what}"
    return f"process {process.pid}"


def _text(path: Path) -> str:
    return path.read_text(errors="replace")

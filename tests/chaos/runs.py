"""Runs a case's job to its end, and looks at what happens meanwhile and what is left."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.hosts.virtual_hosts import Cluster
from tests.support.jobs import runner
from tests.support.jobs.processes import soon
from tests.support.watchdog.records import is_monitor

from .faults import STOP, Case

TRAINING = Path(__file__).with_name("training.py")
# The jobs of this run, by their environment; a value each.
MARK = "CHAINERMN_CHAOS"
# How often it is looked which files are mapped, of a job on a machine that others use.
MAPS_SECONDS = 0.2
# Ends a job that doesn't end by itself, which is a failure.
JOB_SECONDS = 300.0
REPORT = "ChainerMN: likely culprit"
DISK = "1m"


@dataclass
class Seen:
    """A job that has been run; times are `time.time()`, and None where nothing happened."""

    # None if it had to be ended; then `err` has the stacks of all ranks.
    returncode: int | None
    out: str = ""
    err: str = ""
    pids: dict[int, int] = field(default_factory=dict)  # of the ranks
    ended: float = 0.0
    fault: float | None = None
    cut: float | None = None  # of the link
    reported: float | None = None  # by the watchdog
    left: list[str] = field(default_factory=list)  # what was still there a moment later

    @property
    def verdict(self) -> str:
        """What `chainermn launch` said last."""
        return ["", *re.findall(r"^chainermn launch: (.*)$", self.err, re.M)][-1]

    @property
    def ends(self) -> dict[str, str]:
        """What each rank ended with."""
        return dict(re.findall(r"^END (\d+) (\w+)$", self.out, re.M))


class Here:
    """This machine, which others use too."""

    def run(
        self, case: Case, file: Path, added: dict[str, str], meanwhile: runner.Meanwhile
    ) -> runner.Job:
        """Run the job that the file describes."""
        launch = [sys.executable, "-m", "chainermn_tools", "launch"]
        mpiexec = [str(runner.MPIEXEC), "-n", str(case.ranks), sys.executable]
        words = (
            mpiexec if case.launcher == "mpiexec" else [*launch, "-n", str(case.ranks)]
        )
        return runner.run_command(
            [*words, str(TRAINING), str(file)],
            runner.variables(added),
            JOB_SECONDS,
            lambda: self.processes(added[MARK]),
            cwd=file.parent,
            meanwhile=meanwhile,
        )

    def processes(self, mark: str, ranks: Iterable[int] = ()) -> list[psutil.Process]:
        """Those of the job: all that have its mark, and the monitors of its ranks."""
        wanted, pids = f"{MARK}={mark}".encode(), set(map(str, ranks))
        found = []
        for process in psutil.process_iter():
            folder = Path(f"/proc/{process.pid}")
            with contextlib.suppress(OSError):
                marked = wanted in (folder / "environ").read_bytes().split(b"\0")
                words = (folder / "cmdline").read_text(errors="replace").split("\0")
                if marked or (is_monitor(words) and pids & set(words)):
                    found.append(process)
        return found

    def shared(self, mapped: set[str]) -> list[Path]:
        """Of the files in /dev/shm that ranks of the job have mapped, those that are there."""
        return [
            path for name in sorted(mapped) if (path := Path("/dev/shm", name)).exists()
        ]

    def seen(self, folder: Path) -> Path:
        """The folder as the job sees it."""
        return folder


class Hosts:
    """Hosts that nobody else uses."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.roots = [
            Path(f"/proc/{cluster.inits[host]}/root") for host in cluster.hosts
        ]

    def run(
        self, case: Case, file: Path, added: dict[str, str], meanwhile: runner.Meanwhile
    ) -> runner.Job:
        """Run the job that the file describes, from the first host."""
        second = case.ranks // 2 if case.hosts == 2 else 0
        numbers = zip(self.cluster.hosts, (case.ranks - second, second), strict=True)
        dealt = {host: number for host, number in numbers if number}
        how = {"seconds": JOB_SECONDS, "meanwhile": meanwhile}
        if case.launcher == "mpiexec":
            return self.cluster.job(dealt, TRAINING, file, environment=added, **how)
        # Where Open MPI's daemons on other hosts make their folders.
        folder = {"PRTE_MCA_prte_remote_tmpdir_base": added["TMPDIR"]}
        words = (
            "--hosts",
            ",".join(f"{host}:{number}" for host, number in dealt.items()),
        )
        words = (*words, "-n", str(case.ranks), TRAINING, file)
        return self.cluster.launch(*words, environment=added | folder, **how)

    def processes(self, mark: str, ranks: Iterable[int] = ()) -> list[psutil.Process]:
        """All that run there, but for sshd's, which outlast a cut link as TCP's connections do."""
        found = []
        for process in self.cluster.processes():
            with contextlib.suppress(psutil.Error):
                if not process.name().startswith("sshd"):
                    found.append(process)
        return found

    def shared(self, mapped: set[str]) -> list[Path]:
        """All files in /dev/shm."""
        return [path for root in self.roots for path in (root / "dev/shm").iterdir()]

    def seen(self, folder: Path) -> Path:
        """The folder as the job sees it on the first host, whatever is mounted there."""
        return self.roots[0].joinpath(*folder.parts[1:])

    @contextlib.contextmanager
    def made_for(self, kind: str, folder: Path) -> Iterator[None]:
        """Meanwhile the folder is a small disk on the first host, if such a fault needs that."""
        first = self.cluster.hosts[0]
        if kind == "disk":
            self.cluster.run(
                first, "mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder
            )
        try:
            yield
        finally:
            if kind == "disk":
                self.cluster.run(first, "umount", "-l", folder)

    def link(self, state: str) -> None:
        """Cut the second host's link ("down"), or mend it ("up")."""
        self.cluster.run(self.cluster.hosts[1], "ip", "link", "set", "eth0", state)


Ground = Here | Hosts


def read_status(folder: Path, name: str) -> float | None:
    path = folder / "status" / name
    return float(path.read_text()) if path.exists() else None


def run(
    case: Case, ground: Ground, folder: Path, seconds: float, after: float | None = None
) -> Seen:
    """Run the job of a case, or the one that goes on from what it left in the folder.

    Args:
        case: which job.
        ground: where.
        folder: of the job.
        seconds: CHAINERMN_TIMEOUT.
        after: the seconds until the fault comes, where it has no moment; None for no
            fault.
    """
    out, status, temporary = (folder / name for name in ("out", "status", "tmp"))
    fault = None if after is None else asdict(case) | {"after": after}
    orders = asdict(case) | {
        "stop": STOP,
        "out": str(out),
        "status": str(status),
        "fault": fault,
    }
    file = folder / "orders.json"
    file.write_text(json.dumps(orders))
    mark = secrets.token_hex(8)
    added = {MARK: mark, "TMPDIR": str(temporary), "CHAINERMN_TIMEOUT": f"{seconds:g}"}
    for path in status.glob("rank.*"):
        path.unlink()
    reported, mapped, looked = None, set(), 0.0

    def look(launcher, said):
        nonlocal reported, looked
        if reported is None and REPORT in said()[1]:
            reported = time.time()
        if isinstance(ground, Here):
            if time.monotonic() - looked > MAPS_SECONDS:
                mapped.update(_mapped(launcher))
                looked = time.monotonic()
        elif fault and case.kind == "link" and (status / "fault").exists():
            if read_status(folder, "cut"):
                return
            ground.link("down")
            (status / "cut").write_text(f"{time.time()}")

    job = ground.run(case, file, added, look)
    if REPORT in job.err:
        reported = reported or job.ended
    pids = {
        int(path.suffix[1:]): int(path.read_text()) for path in status.glob("rank.*")
    }

    def left() -> list[object]:
        found = [*ground.shared(mapped), *temporary.rglob("*")]
        return [*found, *map(_described, ground.processes(mark, pids.values()))]

    soon(lambda: not left())
    found = [str(one) for one in left()]
    for process in ground.processes(mark, pids.values()):
        with contextlib.suppress(psutil.Error):
            process.kill()
    for path in ground.shared(mapped):
        with contextlib.suppress(OSError):
            path.unlink()
    times = read_status(folder, "fault"), read_status(folder, "cut"), reported
    return Seen(job.returncode, job.out, job.err, pids, job.ended, *times, found)


def _mapped(launcher: int) -> set[str]:
    """The names in /dev/shm that the launcher's processes have mapped."""
    found: set[str] = set()
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{one.pid}/maps").read_text()
                found.update(re.findall(r"/dev/shm/(.*)(?<! \(deleted\))$", maps, re.M))
    return found


def _described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        words = process.cmdline()
        what = "a monitor" if is_monitor(words) else " ".join(words)[:200]
        return f"process {process.pid} ({process.status()}): {what}"
    return f"process {process.pid}"

"""Runs a case's job on hosts to its end, and looks at what happens meanwhile and what is left."""

from __future__ import annotations

import json
import os
import re
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.support.hosts.virtual_hosts import Cluster
from tests.support.jobs import runner
from tests.support.jobs.processes import soon

from .faults import STOP, Case

TRAINING = Path(__file__).with_name("training.py")
HOSTS = ("alpha", "beta")
# Ends a job that doesn't end by itself, which is a failure.
JOB_SECONDS = 300.0


@dataclass
class Seen:
    """A job that has been run; times are `time.time()`, and None where nothing happened."""

    job: runner.Job
    fault: float | None = None
    cut: float | None = None  # of the link
    left: list[str] = field(default_factory=list)  # what was still there a moment later

    def printed(self, pattern: str) -> list[Any]:
        """What the groups of the pattern are in each line that a rank printed."""
        return re.findall(f"^{pattern}$", self.job.out, re.M)

    @property
    def ends(self) -> dict[str, str]:
        """What each rank ended with."""
        return dict(self.printed(r"END (\d+) (\w+) \S+"))


def run(
    case: Case,
    cluster: Cluster,
    folder: Path,
    seconds: float,
    after: float | None = None,
) -> Seen:
    """Run the job of a case, or the one that goes on from what it left in the folder.

    Args:
        case: which job.
        cluster: the hosts, which run nothing else.
        folder: of the job.
        seconds: CHAINERMN_TIMEOUT.
        after: the seconds until the fault comes, where it has no moment; None for no
            fault.
    """
    status = folder / "status"
    orders = asdict(case)
    if after is None:
        orders["fault"] = None
    else:
        orders["fault"] = asdict(case) | {"after": after}
    orders |= {"stop": STOP, "out": str(folder / "out"), "status": str(status)}
    file = folder / "orders.json"
    file.write_text(json.dumps(orders))
    fault = status / "fault"
    cut = status / "cut"

    def cut_link(*_):
        if case.kind == "link" and fault.exists() and not cut.exists():
            cluster.run(HOSTS[1], "ip", "link", "set", "eth0", "down")
            cut.write_text(f"{time.time()}")

    job = start(case, cluster, file, seconds, cut_link)

    def left() -> list[str]:
        roots = (Path(f"/proc/{init}/root") for init in cluster.inits.values())
        folders = [folder / "tmp", *(root / "dev/shm" for root in roots)]
        found = list(map(str, processes(cluster)))
        for each in folders:
            # Folders that go away meanwhile are left out.
            for parent, inner, files in os.walk(each):
                found += [os.path.join(parent, name) for name in (*inner, *files)]
        return found

    soon(lambda: not left())
    found = left()
    for process in processes(cluster):
        with suppress(psutil.Error):
            process.kill()
    return Seen(job, read_time(fault), read_time(cut), found)


def read_time(path: Path) -> float | None:
    if path.exists():
        return float(path.read_text())
    return None


def start(
    case: Case,
    cluster: Cluster,
    file: Path,
    seconds: float,
    meanwhile: runner.Meanwhile,
) -> runner.Job:
    """Run the job that the file describes, from the first host."""
    second = 0
    if case.hosts == 2:
        second = case.ranks // 2
    ranks = {HOSTS[0]: case.ranks - second}
    if second:
        ranks[HOSTS[1]] = second
    temporary = str(file.parent / "tmp")
    how = {
        "environment": {
            "TMPDIR": temporary,
            # Where Open MPI's daemons on other hosts make their folders.
            "PRTE_MCA_prte_remote_tmpdir_base": temporary,
            "CHAINERMN_TIMEOUT": f"{seconds:g}",
        },
        "seconds": JOB_SECONDS,
        "meanwhile": meanwhile,
    }
    if case.launcher == "mpiexec":
        return cluster.job(ranks, TRAINING, file, **how)
    hosts = ",".join(f"{host}:{number}" for host, number in ranks.items())
    return cluster.launch("--hosts", hosts, "-n", case.ranks, TRAINING, file, **how)


def processes(cluster: Cluster) -> list[psutil.Process]:
    """All that run there, but for sshd's, which outlast a cut link as TCP's connections do."""
    found = []
    for process in cluster.processes():
        with suppress(psutil.Error):
            if not process.name().startswith("sshd"):
                found.append(process)
    return found

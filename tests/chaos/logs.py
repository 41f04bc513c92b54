"""Makes the logs of tests/tools anew: what a user sees of each fault, with paths shortened.

python -m tests.chaos.logs [FAULT ...]
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

from tests.support.hosts.virtual_hosts import Cluster
from tests.support.jobs import runner
from tests.support.jobs.scripts import ROOT

from . import runs
from .faults import EACH, Case
from .trials import LIMIT_SECONDS, folder_of

FOLDER = ROOT / "tests/tools/logs"
LAUNCHERS = ("launch", "mpiexec")
VICTIM = 1
# Each on three ranks, the second one of which fails.
CASES = {case.kind: replace(case, ranks=3, victim=VICTIM) for case in EACH}

BEGIN = """\
import signal
import time
import numpy
import psutil
from chainermn_comm import create_communicator

"""
CTRL_C = """\
comm = create_communicator('flat')
comm.bcast_obj(None)  # all have begun
if comm.rank == comm.size - 1:
    for parent in psutil.Process().parents():
        if "launch" in parent.cmdline():
            parent.send_signal(signal.SIGINT)
time.sleep(1000)
"""
# Other jobs under `launch`: ranks and script.
JOBS = {
    "ctrl_c": (3, CTRL_C),
    "typo": (3, "comm = create_communicator('hierarchicl')\n"),
    "odd": (
        8,
        "comm = create_communicator('flat')\n"
        "comm.allreduce(numpy.zeros(4 if comm.rank == 3 else 3))\n",
    ),
}


def log_of_job(kind: str, folder: Path) -> str:
    """What a job of `JOBS` prints, run in the folder."""
    ranks, text = JOBS[kind]
    (folder / "train.py").write_text(BEGIN + text)
    launch = [sys.executable, "-m", "chainermn_tools", "launch", f"-n{ranks}"]
    environment = runner.variables()
    job = runner.run_command(
        [*launch, "train.py"], environment, runner.SECONDS, cwd=folder
    )
    return job.out + job.err


def log_of_case(case: Case, cluster: Cluster, folder: Path) -> str:
    """What the job of a fault prints."""
    seen = runs.run(case, cluster, folder, LIMIT_SECONDS, 0.0)
    cluster.run(runs.HOSTS[1], "ip", "link", "set", "eth0", "up")
    return seen.job.out + seen.job.err


def shortened(text: str, folder: Path) -> str:
    """The text with the paths and the name that a user's machine may have."""
    for pattern, name in (
        (re.escape(str(folder)), "/scratch/job"),
        # Jobs in / name files without the first slash.
        (f"/?{re.escape(str(ROOT)[1:])}/tests/chaos", "/home/user"),
        (rf"{re.escape(str(ROOT))}/packages/[\w-]+/src", "/venv/site-packages"),
        (rf"{re.escape(sys.prefix)}/lib/[\w.]+/site-packages", "/venv/site-packages"),
        (re.escape(sys.prefix), "/venv"),
        (re.escape(os.path.dirname(os.__file__)), "/usr/lib/python3"),
        (rf"\b({os.uname().nodename}|alpha)\b", "node1"),
    ):
        text = re.sub(pattern, name, text)
    return text


def main():
    with Cluster(runs.HOSTS) as cluster:
        for kind in sys.argv[1:] or [*CASES, *JOBS]:
            for launcher in LAUNCHERS:
                if launcher == "mpiexec" and (kind in JOBS or kind == "link"):
                    continue  # it waits for ever where a link is cut
                case = replace(CASES.get(kind, EACH[0]), launcher=launcher)
                with folder_of(case, cluster) as folder:
                    if kind in JOBS:
                        text = log_of_job(kind, folder)
                    else:
                        text = log_of_case(case, cluster, folder)
                path = FOLDER / f"{kind}.{launcher}.log"
                path.write_text(shortened(text, folder))
                print(path.name, flush=True)


if __name__ == "__main__":
    main()

"""Makes the logs of tests/tools/logs anew: what a user sees of each fault, with paths shortened.

python -m tests.chaos.logs [FAULT ...]
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.support.hosts.virtual_hosts import Cluster, missing
from tests.support.jobs import runner
from tests.support.jobs.scripts import ROOT

from . import runs
from .faults import KINDS, Case
from .runs import Here, Hosts
from .trials import LIMIT_SECONDS, made_folder

FOLDER = ROOT / "tests/tools/logs"
LAUNCHERS = ("launch", "mpiexec")
VICTIM = 1
# Each on three ranks, the second one of which fails.
CASES = {
    case.kind: replace(case, ranks=3, victim=VICTIM)
    for case in (
        Case("exception", "user code", 2),
        Case("sys.exit", "bcast_data"),
        Case("os._exit", "first update"),
        Case("SIGTERM", "collective", 4),
        Case("SIGKILL", "collective", 4),
        Case("SIGSEGV", "user code", 5),
        Case("memory", "user code", 5),
        Case("SIGSTOP", "collective", 4),
        Case("loop", "user code", 2),
        Case("held", "user code", 2),
        Case("skip", "collective", 4),
        Case("other", "collective", 4),
        Case("shape", "collective", 4),
        Case("disk", "writing", 6),
        Case("link", "collective", 4, hosts=2),
    )
}

BEGIN = """\
import time
import numpy
from chainermn_comm import create_communicator

"""
# Other jobs under `launch`: ranks, script, and whether Ctrl-C ends it once it says
# "begun".
JOBS = {
    "ctrl_c": (
        *(
            3,
            "comm = create_communicator('flat')\nprint('begun', flush=True)\ntime.sleep(1000)\n",
        ),
        True,
    ),
    "typo": (3, "comm = create_communicator('hierarchicl')\n", False),
    "odd": (
        8,
        "comm = create_communicator('flat')\n"
        "comm.allreduce(numpy.zeros(4 if comm.rank == 3 else 3))\n",
        False,
    ),
}


def log_of_job(kind: str, folder: Path) -> str:
    """What a job of `JOBS` prints, run in the folder."""
    ranks, text, is_interrupted = JOBS[kind]
    (folder / "train.py").write_text(BEGIN + text)
    words = [
        sys.executable,
        "-m",
        "chainermn_tools",
        "launch",
        "-n",
        str(ranks),
        "train.py",
    ]
    with subprocess.Popen(
        words,
        cwd=folder,
        env=runner.variables({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        said = ""
        for line in job.stdout:
            said += line
            if is_interrupted and said.count("begun") == ranks:
                job.send_signal(signal.SIGINT)
                is_interrupted = False
    return said


def shortened(text: str, folder: Path) -> str:
    """The text with the paths and the name that a user's machine may have."""
    library = re.escape(os.path.dirname(os.__file__))
    for pattern, name in (
        (re.escape(str(folder)), "/scratch/job"),
        (re.escape(f"{ROOT}/tests/chaos"), "/home/user"),
        (rf"{re.escape(str(ROOT))}/packages/[\w-]+/src", "/venv/site-packages"),
        (rf"{re.escape(sys.prefix)}/lib/[\w.]+/site-packages", "/venv/site-packages"),
        (re.escape(sys.prefix), "/venv"),
        (library, "/usr/lib/python3"),
        (rf"\b{os.uname().nodename}\b", "node1"),
    ):
        text = re.sub(pattern, name, text)
    return text


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for kind in sys.argv[1:] or [*KINDS, *JOBS]:
        if kind in JOBS:
            with made_folder() as folder:
                said = log_of_job(kind, folder)
                (FOLDER / f"{kind}.launch.log").write_text(shortened(said, folder))
            continue
        # mpiexec waits for ever.
        for launcher in LAUNCHERS if kind != "link" else LAUNCHERS[:1]:
            case = replace(CASES[kind], launcher=launcher)
            with contextlib.ExitStack() as stack:
                ground: Here | Hosts = Here()
                folder = stack.enter_context(made_folder())
                if kind in ("disk", "link"):
                    if lacking := missing():
                        print(f"no log of {kind}: {lacking}")
                        continue
                    ground = Hosts(stack.enter_context(Cluster(("alpha", "beta"))))
                    stack.enter_context(ground.made_for(kind, folder / "out"))
                seen = runs.run(case, ground, folder, LIMIT_SECONDS, 0.0)
            (FOLDER / f"{kind}.{launcher}.log").write_text(
                shortened(seen.out + seen.err, folder)
            )
            print(f"{kind} by {launcher}: status {seen.returncode}", flush=True)


if __name__ == "__main__":
    main()

"""Looks into running jobs by `chainermn top` and `stacks`, and ends them then."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.chaos.faults import STOP, Case
from tests.chaos.runs import TRAINING
from tests.support.jobs import commands, runner
from tests.support.watchdog import records

# Ranks that train until they are ended, of which rank 1 comes last to each update.
UNENDING = """
import sys, time
import chainer
import numpy as np
from chainer import functions as F, links as L
from chainermn_comm import create_communicator
from chainermn_train import create_multi_node_optimizer

comm = create_communicator("naive")
model = L.Classifier(L.Linear(3, 2))
optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
for step in range(1_000_000):
    if comm.rank == 1:
        time.sleep(0.05)
    optimizer.update(model, np.ones((4, 3), "f4"), np.zeros(4, "i4"))
    if step == 5 and comm.rank == 0:
        print("TRAINS", flush=True)
    if step == int(sys.argv[1]):
        break
"""


class _Looked(Exception):
    """The job can be ended."""


def while_running(
    look: Callable[[int], Any],
    last: int = -1,
    start: Callable[..., runner.Job] = runner.run,
    ranks=3,
):
    """What ``look`` returns of a job that trains, given the number of its mpiexec.

    The ranks, for which `start` may be another starter, end after the step ``last`` by
    themselves, or else when ``look`` returns.
    """
    found = []

    def watch(launcher: int, said: Callable[[], tuple[str, str]]):
        if not found and "TRAINS" in said()[0]:
            found.append(look(launcher))
            if last < 0:
                raise _Looked

    with tempfile.TemporaryDirectory(prefix="chainermn-look-") as name:
        path = Path(name, "script.py")
        path.write_text(runner.PRELUDE + UNENDING)
        try:
            job = start(ranks, path, last, meanwhile=watch)
            assert job.returncode == 0, job
        except _Looked:
            pass
    return found[0]


def looked_into(case: Case) -> tuple[dict[str, Any], str]:
    """What `top --json` and `stacks` print of a case's job while a rank hangs."""
    found: list[str] = []

    def look(launcher: int, _):
        if (status / "fault").exists():
            for words in (("top", launcher, "--json"), ("stacks", launcher)):
                done = commands.chainermn(*words)
                assert done.returncode == 0, done
                found.append(done.stdout)
            raise _Looked

    with tempfile.TemporaryDirectory(prefix="chainermn-look-") as name:
        out, status, file = (Path(name, it) for it in ("out", "status", "orders.json"))
        out.mkdir()
        status.mkdir()
        orders = {"stop": STOP, "out": str(out), "status": str(status)}
        whole = asdict(case) | orders | {"fault": asdict(case)}
        file.write_text(json.dumps(whole))
        try:
            job = runner.run(case.ranks, TRAINING, file, meanwhile=look)
        except _Looked:
            return json.loads(found[0]), found[1]
    raise AssertionError(f"it didn't hang: {job!r}")


def monitors_of(launcher: int) -> list[psutil.Process]:
    """The monitors, and those that start them again, of the job of an mpiexec."""
    children = psutil.Process(launcher).children(recursive=True)
    return records.monitors_of({str(child.pid) for child in children})

"""The watchdog over several hosts: who is to blame may be elsewhere, and a link may be cut."""

from __future__ import annotations

import re
import threading
import time

import psutil
import pytest

from ..launch.jobs import PRELUDE
from .test_hosts import gone

SCRIPT = f"""{PRELUDE}
import sys, time
import numpy as np
from chainermn_comm import create_communicator

comm = create_communicator("naive")
comm.allreduce(np.ones(10))
print("READY", flush=True)
if comm.rank == 2:
    def elsewhere():
        while True:
            time.sleep(0.01)
    elsewhere()
comm.bcast(np.ones(10))
comm.allreduce(np.ones(10))
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("ranks", [{"alpha": 2, "beta": 1}, {"alpha": 2, "beta": 2}])
def test_a_culprit_on_another_host_is_named_with_its_stack(cluster, path, ranks):
    job = cluster.job(ranks, path, environment={"CHAINERMN_TIMEOUT": "5"})
    assert job.returncode is not None, f"the job hung\n{job}"
    assert job.returncode != 0, job
    reports = job.err.split("likely culprit")[1:]
    assert reports, job
    assert reports[0].startswith(": rank 2 "), job
    assert re.match(r": rank 2 \(process \d+ on beta\) is in no call", reports[0]), job
    assert re.search(r"^  rank 0 \(process \d+ on alpha\) waits in ", reports[0], re.M), job
    assert re.search(r"^Stacks of rank 2\b[\s\S]*?in elsewhere", reports[0], re.M), job
    assert gone(cluster.processes), cluster.processes()


def test_a_cut_link_ends_the_ranks_on_both_sides(cluster, path):
    """MPI itself doesn't notice."""

    def cut():
        deadline = time.monotonic() + 40
        while len(ranks_of(cluster, path)) < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(8)  # for the monitors to have heard of one another
        cluster.run("beta", "ip", "link", "set", "eth0", "down")
        deadline = time.monotonic() + 60
        while (left := ranks_of(cluster, path)) and time.monotonic() < deadline:
            time.sleep(0.2)
        found.append(left)

    found: list[list[psutil.Process]] = []
    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        job = cluster.job({"alpha": 2, "beta": 1}, path, seconds=75)
    finally:
        cutter.join(100)
        cluster.run("beta", "ip", "link", "set", "eth0", "up")
    assert found == [[]], job
    assert "beta has not answered" in job.err, job
    # MPICH's mpiexec itself goes on waiting for its ssh; whoever started it must end it.
    assert job.returncode != 0, job


def ranks_of(cluster, path):
    found = []
    for process in cluster.processes():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if words[-1:] == [str(path)] and "python" in process.name():
            found.append(process)
    return found

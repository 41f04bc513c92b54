"""The watchdog over several hosts: who is to blame may be elsewhere, and a link may be cut."""

from __future__ import annotations

import contextlib
import re

import psutil
import pytest

from tests.support.hosts.virtual_hosts import Cluster, missing
from tests.support.jobs.processes import soon
from tests.support.jobs.runner import PRELUDE

SCRIPT = f"""{PRELUDE}
import sys, time
import numpy as np
from mpi4py import MPI
from chainermn_comm import create_communicator

MPI.COMM_WORLD.Barrier()  # that some ranks take longer to start on a busy machine is no stall
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


def test_a_culprit_on_another_host_is_named_with_its_stack(cluster, path):
    job = cluster.job(
        {"alpha": 2, "beta": 2}, path, environment={"CHAINERMN_TIMEOUT": "5"}
    )
    assert job.returncode not in (0, None), job
    reports = job.err.split("likely culprit")[1:]
    assert reports, job
    assert reports[0].startswith(": rank 2 "), job
    assert re.match(r": rank 2 \(process \d+ on beta\) is in no call", reports[0]), job
    assert re.search(
        r"^  rank 0 \(process \d+ on alpha\) waits in ", reports[0], re.M
    ), job
    assert re.search(r"^Stacks of rank 2\b[\s\S]*?in elsewhere", reports[0], re.M), job
    assert soon(lambda: not cluster.processes()), cluster.processes()


KILLED = f"""{PRELUDE}
import os, time
from chainermn_comm import create_communicator

comm = create_communicator("naive")
comm.allreduce_obj(1)
if comm.rank == 1:
    time.sleep(1.0)
    os.kill(os.getpid(), 9)
comm.allreduce_obj(1)
"""


# Where mpiexec has ended before the first host's monitor hears, it is lost.
@pytest.mark.full
def test_the_rank_that_died_first_is_named_over_hosts(cluster, path):
    path.write_text(KILLED)
    job = cluster.job({"alpha": 1, "beta": 1}, path)
    assert job.returncode, job
    (words,) = re.findall(
        r"^ChainerMN: rank (\d) \(process \d+ on (\w+)\) is gone", job.err, re.M
    )
    assert words == ("1", "beta"), job


CUT = f"""{PRELUDE}
import sys, time
from pathlib import Path
import numpy as np
from tests.support.watchdog.records import communicator_within

comm = communicator_within("naive", seconds=24.0, silence=8.0, ends_job=True)
comm.allreduce(np.ones(10))
if comm.rank == 1:  # until the first monitor, which has asked the other, warns of the others' call
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
comm.allreduce(np.ones(10))
Path(sys.argv[2]).touch()
if comm.rank == 2:  # it hears of no end, and is ended once it waits, too
    time.sleep(3)
comm.allreduce(np.ones(10))
"""


def test_a_cut_link_ends_the_ranks_on_both_sides_and_the_launcher(
    cluster, path, tmp_path
):
    """MPI itself doesn't notice, and MPICH's mpiexec goes on waiting for its ssh."""
    path.write_text(CUT)
    warned, ready, before = tmp_path / "warned", tmp_path / "ready", memory_of(cluster)

    def cut(_, said):
        if "has waited" in said()[1]:
            warned.touch()
        if ready.exists():
            ready.unlink()
            cluster.run("beta", "ip", "link", "set", "eth0", "down")

    try:
        words = ("--hosts", "alpha:2,beta:1", "-n", 3, path, warned, ready)
        job = cluster.launch(*words, meanwhile=cut)
        assert soon(lambda: not ranks_of(cluster, path)), job
    finally:
        cluster.run("beta", "ip", "link", "set", "eth0", "up")
    lost = "could not be asked; rank 2 on beta didn't answer (is a link cut"
    assert f"ChainerMN: ranks wait for others that {lost}" in job.err, job
    assert job.returncode, job
    assert soon(lambda: not cluster.processes()), cluster.processes()
    assert memory_of(cluster) <= before


def memory_of(cluster):
    """What lies in the hosts' shared memory; jobs of other tests may have left some."""
    return {
        (host, name)
        for host in ("alpha", "beta")
        for name in cluster.run(host, "ls", "/dev/shm").split()
    }


def ranks_of(cluster, path):
    found = []
    for process in cluster.processes():
        with contextlib.suppress(psutil.Error):
            if {str(path), "chainermn_tools.rank"} <= set(process.cmdline()):
                found.append(process)
    return found


LOST = f"""{PRELUDE}
import time
import numpy as np
from tests.support.watchdog.records import communicator_within

comm = communicator_within("naive", seconds=28.0, silence=8.0)
comm.allreduce(np.ones(10))
if comm.rank == 1:  # so that all others' calls wait for the host that is lost
    time.sleep(1000)
comm.allreduce(np.ones(10))
"""


@pytest.mark.full
def test_of_a_host_that_is_lost_the_first_one_speaks_and_all_others_are_heard_of(path):
    lacking = missing()
    if lacking:
        pytest.skip(f"no hosts can be made here: {lacking}")
    path.write_text(LOST)
    hosts, waiting = [f"h{number}" for number in range(6)], {0, 2, 3, 4, 5}
    with Cluster(hosts) as many:

        def watch(_, said):  # for the warning the first monitor has asked all others
            if "has waited" in said()[1]:
                many.run("h1", "ip", "link", "set", "eth0", "down")
            if "The ranks go on waiting." in said()[1]:
                for process in many.processes():
                    with contextlib.suppress(psutil.Error):
                        process.kill()

        job = many.job(dict.fromkeys(hosts, 1), path, meanwhile=watch)
    assert job.err.count("A report follows at") == 1, job
    _, report = re.split(r"ChainerMN: ranks wait for others", job.err)
    assert "rank 1 on h1 didn't answer" in report, job
    found = re.findall(r"^  rank (\d) \(process \d+ on h\1\) waits", report, re.M)
    assert set(map(int, found)) == waiting, job
    assert "not heard of: 1 of the 6 ranks" in report, job

"""The promises of docs/failures.md that are times, each measured from the failure.

`make test-ci` runs these one after the other with nothing beside; whatever else the
machine does, they must hold. No other test asserts a time.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from tests.chaos.faults import EACH
from tests.chaos.monitors import hubs_port, monitors_on
from tests.chaos.runs import HOSTS
from tests.chaos.trials import CUT, MOST_SECONDS, Trials
from tests.support.hosts.virtual_hosts import Cluster, missing
from tests.support.jobs.failing import (
    COMMUNICATOR,
    ENDS,
    failed,
    seconds_since_failure,
)
from tests.support.jobs.runner import PRELUDE

pytestmark = pytest.mark.alone

# From a rank's failure to the end of mpiexec.
END_SECONDS = 5.0
TIMEOUT_SECONDS = 4.0
# From the time-out to the report.
REPORT_SECONDS = 3.0
# From MPI_Abort to the ranks' end by their monitor.
ABORT_SECONDS = 3.0
# Of a core, that a monitor takes.
MOST_OF_A_CORE = 0.01

FAILURES = ("exception", "sys.exit", "early success", "SIGKILL")
# The rank does nothing that the other waits for.
STALL = """
say_failing()
if world.rank == 1:
    time.sleep(others_stay)
comm.bcast_obj(None)
"""
WATCHED = """
from chainermn_comm import create_communicator
world.Barrier()  # imports take their time, which no watchdog counts
comm = create_communicator("naive")
others_stay = 1000
"""
IN_VAIN = "from tests.support.worlds.planted import abort_in_vain\n"


@pytest.mark.parametrize("end", FAILURES)
def test_five_seconds_after_a_failure_the_job_has_ended(end):
    failure = ENDS[end]
    job = failed(
        2, failure.status, failure.words, end=failure.statement, install=COMMUNICATOR
    )
    assert seconds_since_failure(job) < END_SECONDS, job


def test_a_killed_rank_is_named_before_mpiexec_has_ended():
    """Without a time-out, too; where others compute, mpiexec may be the first."""
    environment = {"CHAINERMN_TIMEOUT": "0"}
    end = ENDS["SIGKILL"].statement
    job = failed(2, None, environment=environment, end=end, install=COMMUNICATOR)
    assert re.search(r"ChainerMN: rank 1 \(process \d+ .*\) is gone", job.err), job


def test_a_call_that_waits_is_reported_and_the_job_ended_when_the_time_out_is_over():
    environment = {"CHAINERMN_TIMEOUT": f"{TIMEOUT_SECONDS:g}"}
    job = failed(2, None, environment=environment, install=WATCHED, body=STALL)
    (waited,) = re.findall(
        r"likely culprit: rank 1 .*\n.* has waited for ([\d.]+) s", job.err
    )
    reported = TIMEOUT_SECONDS + REPORT_SECONDS
    assert TIMEOUT_SECONDS <= float(waited) < reported, job
    assert TIMEOUT_SECONDS < seconds_since_failure(job) < reported + END_SECONDS, job


def test_three_seconds_after_an_abort_in_vain_the_ranks_are_ended():
    end = "abort_in_vain()\ntime.sleep(1000)"
    job = failed(2, None, end=end, install=WATCHED + IN_VAIN)
    assert ABORT_SECONDS < seconds_since_failure(job) < ABORT_SECONDS + END_SECONDS, job


@pytest.mark.skipif(bool(missing()), reason="no hosts can be made here")
def test_forty_seconds_after_a_link_was_cut_the_ranks_on_both_sides_have_ended():
    """20 for the silence to be no hiccup; then the monitors', the launcher's and MPI's own ends."""
    (case,) = (case for case in EACH if case.kind == "link")
    with Cluster(HOSTS) as cluster:
        trial = Trials(cluster).run(case, restart=False)
    assert not trial.wrongs, f"{trial}"
    assert trial.seconds[CUT] < MOST_SECONDS[CUT], trial.seconds


MANY_MAPPINGS = """
import mmap, sys, time
from pathlib import Path
from chainermn_comm import create_communicator

kinds = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
maps = [mmap.mmap(-1, 4096, prot=kinds[number % 2]) for number in range(8000)]
comm = create_communicator("naive")
Path(sys.argv[1]).touch()
while comm.bcast_obj(not Path(sys.argv[2]).exists()):
    time.sleep(0.1)
"""


BUSY_SECONDS = 20.0
CONNECTIONS = 2000
# Connects so often to a port, and says nothing.
CONNECT = """
import resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
address, port, count, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
held, end = [], time.monotonic() + seconds
print("begins", flush=True)
for _ in range(count):
    held.append(socket.create_connection((address, port), 5))
time.sleep(max(0.0, end - time.monotonic()))
"""
MAKE_FILES = """
import os, sys, time
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    path = f"/dev/shm/somebody-elses-{os.getpid()}"
    open(path, "w").close()
    os.unlink(path)
    time.sleep(0.005)
"""


def share_of_a_core(cluster):
    """What the busiest monitor takes beside strangers, as a part of one core's time."""
    first, second = cluster.hosts
    address = cluster.run(first, "hostname", "-I").split()[0]
    words = address, f"{hubs_port(cluster)}", f"{CONNECTIONS}", f"{BUSY_SECONDS}"
    connecting = subprocess.Popen(
        [*cluster.on(second), sys.executable, "-c", CONNECT, *words],
        stdout=subprocess.PIPE,
    )
    making = [
        subprocess.Popen(
            [*cluster.on(host), sys.executable, "-c", MAKE_FILES, f"{BUSY_SECONDS}"]
        )
        for host in cluster.hosts
    ]
    assert connecting.stdout is not None
    connecting.stdout.readline()
    monitors = monitors_on(cluster)
    before = [sum(one.cpu_times()[:2]) for one in monitors]
    begun = time.monotonic()
    for process in (connecting, *making):
        process.wait()
    seconds = time.monotonic() - begun
    connecting.stdout.close()
    after = [sum(one.cpu_times()[:2]) for one in monitors]
    return max(b - a for a, b in zip(before, after, strict=True)) / seconds


@pytest.mark.full
@pytest.mark.skipif(bool(missing()), reason="no hosts can be made here")
def test_beside_strangers_and_makers_of_files_a_monitor_takes_a_hundredth_of_a_core(
    tmp_path,
):
    """2,000 connections that say nothing, and 200 files a second in /dev/shm."""
    path, ready, over = (tmp_path / name for name in ("script.py", "ready", "over"))
    path.write_text(PRELUDE + MANY_MAPPINGS)
    found = []
    with Cluster(("alpha", "beta")) as cluster:

        def measure(*_):
            if ready.exists() and not found:
                found.append(share_of_a_core(cluster))
                over.touch()

        words = {"alpha": 2, "beta": 1}, path, ready, over
        job = cluster.job(
            *words, environment={"CHAINERMN_TIMEOUT": "60"}, meanwhile=measure
        )
    assert job.returncode == 0, job
    assert "ChainerMN" not in job.err, job
    assert found[0] < MOST_OF_A_CORE, found

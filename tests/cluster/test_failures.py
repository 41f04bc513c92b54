"""A rank that fails on one host ends the job on all, is named with its host, and leaves nothing.

A link that is cut is among the promises of time.
"""

from __future__ import annotations

import re

import pytest

from tests.support.jobs.failing import ENDS, check_ended, script
from tests.support.jobs.processes import soon
from tests.support.plugins.pairwise import in_full

TWO = {"alpha": 2, "beta": 2}
INSTALL = """
import numpy as np
from tests.support.worlds.models import with_grads
from chainermn_comm import create_communicator
world.Barrier()  # that some ranks take longer to start on a busy machine is no stall
"""
BODY = """
def elsewhere():
    while True:
        time.sleep(0.01)

comm = create_communicator()
comm.allreduce_grad(with_grads(w=np.ones(1_000_000, "float32")))  # makes the shared window
if comm.rank == 2:
    time.sleep(1.0)  # the others' call waits, so the monitors have met
    say_failing()
    exec(end)
comm.allreduce_obj(1)
"""
STATEMENTS = {
    "exception": ENDS["exception"].statement,
    "SIGKILL": ENDS["SIGKILL"].statement,
    "stall": "elsewhere()",
}
# What is said of each.
SAID = {
    "exception": [
        "^RuntimeError: planted$",
        "^ChainerMN: rank 2 of 4: uncaught RuntimeError, ending the job",
    ],
    "SIGKILL": [r"^ ?ChainerMN: rank 2 \(process \d+ on beta\) is gone"],
    "stall": [
        r"likely culprit: rank 2 \(process \d+ on beta\) is in no call",
        r"^  rank 0 \(process \d+ on alpha\) waits in ",
        r"^Stacks of rank 2\b[\s\S]*?in elsewhere",
    ],
}


@pytest.mark.parametrize(
    ("failure", "launcher"),
    [
        ("exception", "launch"),
        ("stall", "mpiexec"),
        # Where mpiexec has ended before the first host's monitor hears, it is lost.
        *in_full(("exception", "mpiexec"), ("stall", "launch"), ("SIGKILL", "mpiexec")),
    ],
)
def test_it_ends_the_job_on_all_hosts(cluster, tmp_path, failure, launcher):
    path = script(tmp_path, STATEMENTS[failure], install=INSTALL, body=BODY)
    environment = {"CHAINERMN_TIMEOUT": "5"}
    with cluster.shm("alpha", "200m"), cluster.shm("beta", "200m"):
        if launcher == "launch":
            words = ("--hosts", "alpha,beta", "-n", 4, path)
            job = cluster.launch(*words, environment=environment)
            assert re.search("^chainermn launch: .*rank 2 ", job.err, re.M), job
        else:
            job = cluster.job(TWO, path, environment=environment)
        check_ended(job)
        for words in SAID[failure]:
            assert re.search(words, job.err, re.M), (words, job)
        assert soon(lambda: not cluster.processes()), cluster.processes()
        for host in TWO:  # no window; MPICH leaves 2 MB of its own
            used = cluster.run(host, "du", "-sk", "/dev/shm").split()[0]
            assert int(used) < 4096

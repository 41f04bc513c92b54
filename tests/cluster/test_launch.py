"""`chainermn launch` over hosts that share no folder for it and no port but ssh's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.jobs import elastic, runner
from tests.support.jobs.processes import soon

ELASTIC = Path(elastic.__file__)

SCRIPT = """\
import os, sys
import chainermn_comm
from mpi4py import MPI
comm = chainermn_comm.create_communicator()
places = comm.allgather_obj((MPI.Get_processor_name(), sys.argv[1:], os.environ.get("CHAINERMN_X")))
if "fail" in sys.argv and comm.rank == 2:
    raise ValueError("of rank 2")
if comm.rank == 0:
    print(places)
"""


def test_ranks_of_all_hosts_say_goodbye(cluster, tmp_path):
    folder = tmp_path / "a folder; of 'mine'"
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    arguments = ["a b", "'", "$(id)", ":"]
    words = ("--hosts", "alpha,beta", "-n", 4, script, *arguments)
    job = cluster.launch(*words, environment={"CHAINERMN_X": "a b;'c'"})
    assert job.returncode == 0, job
    place = [
        (host, arguments, "a b;'c'") for host in ("alpha", "alpha", "beta", "beta")
    ]
    assert job.out.strip() == str(place), job


def test_a_failure_on_another_host_is_shown_and_nothing_stays_there(cluster, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("alpha slots=2\nbeta slots=2\n")
    job = cluster.launch(
        "--hostfile", tmp_path / "hosts", tmp_path / "script.py", "fail"
    )
    assert job.returncode == 1, job
    assert "rank 2 on beta failed first: ValueError: of rank 2" in job.err
    assert soon(lambda: not cluster.processes()), cluster.processes()


@pytest.mark.full
def test_the_run_goes_on_with_the_hosts_that_still_answer(cluster, tmp_path):
    """And ends with the parameters of an undisturbed run in one process."""
    stop, cuts = 300, []

    def cut(_, said):
        if not cuts and "SAVED 20\n" in said()[0]:
            cluster.run("beta", "ip", "link", "set", "eth0", "down")
            cuts.append("beta")

    digits = elastic.digits(tmp_path)
    words = (
        "--hosts",
        "alpha:2,beta:2",
        "--max-restarts",
        2,
        "--min-ranks",
        2,
        ELASTIC,
    )
    quick = {"CHAINERMN_TIMEOUT": "5", "CHAINERMN_HOST_SILENCE": "3"}
    try:
        job = cluster.launch(
            *words,
            digits,
            tmp_path / "run",
            stop,
            "at once",
            -1,
            0,
            environment=quick,
            meanwhile=cut,
        )
    finally:
        cluster.run("beta", "ip", "link", "set", "eth0", "up")
    assert cuts
    assert job.returncode == 0, job
    assert "starting again with 2 ranks, 1 of 2" in job.err
    begins = [int(each) for each in re.findall(r"^BEGIN (\d+)", job.out, re.M)]
    assert begins[0] == 0
    assert begins[-1] >= 20
    alone = runner.run(1, ELASTIC, digits, tmp_path / "whole", stop, "at once", -1, 0)
    ends = [
        json.loads(re.search(r"^END (.*)$", each.out, re.M)[1]) for each in (job, alone)
    ]
    np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=0, atol=1e-10)
    assert ends[0][1] == ends[1][1] > 0.9

"""`chainermn launch` over hosts that share no folder for it and no port but ssh's."""

from __future__ import annotations

import re

import pytest

from tests.support.jobs import elastic

SCRIPT = """\
import os, sys
import chainermn_comm
from mpi4py import MPI
comm = chainermn_comm.create_communicator()
places = comm.allgather_obj((MPI.Get_processor_name(), sys.argv[1:], os.environ.get("CHAINERMN_X")))
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


@pytest.mark.full
def test_the_run_goes_on_with_the_hosts_that_still_answer(cluster, tmp_path):
    """What it ends with is compared in tests/train/test_kill_and_change.py."""
    cuts = []

    def cut(_, said):
        if not cuts and "SAVED 20\n" in said()[0]:
            cluster.run("beta", "ip", "link", "set", "eth0", "down")
            cuts.append("beta")

    digits = elastic.digits(tmp_path)
    job = cluster.launch(
        *("--hosts", "alpha:2,beta:2", "--max-restarts", 2, "--min-ranks", 2),
        *(elastic.__file__, digits, tmp_path / "run", 300, "at once", -1, 0),
        environment={"CHAINERMN_TIMEOUT": "5", "CHAINERMN_HOST_SILENCE": "3"},
        meanwhile=cut,
    )
    cluster.run("beta", "ip", "link", "set", "eth0", "up")
    assert cuts
    assert job.returncode == 0, job
    assert "restart 1 of 2, with 2 ranks" in job.err
    begins = [int(each) for each in re.findall(r"^BEGIN (\d+)", job.out, re.M)]
    assert begins[0] == 0
    assert begins[-1] >= 20

"""`chainermn launch` over hosts that share no folder for it and no port but ssh's."""

from __future__ import annotations

from tests.support.processes import soon

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
    place = [(host, arguments, "a b;'c'") for host in ("alpha", "alpha", "beta", "beta")]
    assert job.out.strip() == str(place), job


def test_a_failure_on_another_host_is_shown_and_nothing_stays_there(cluster, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("alpha slots=2\nbeta slots=2\n")
    job = cluster.launch("--hostfile", tmp_path / "hosts", tmp_path / "script.py", "fail")
    assert job.returncode == 1, job
    assert "rank 2 on beta failed first: ValueError: of rank 2" in job.err
    assert soon(lambda: not cluster.processes()), cluster.processes()

"""`chainermn launch` over hosts that share no folder for it and no port but ssh's."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.support.virtual_hosts import Cluster

SECONDS = 100.0
SCRIPT = """\
import os, sys
import chainermn_comm
from mpi4py import MPI
comm = chainermn_comm.create_communicator()
places = comm.allgather_obj((MPI.Get_processor_name(), sys.argv[1:], os.environ["CHAINERMN_X"]))
if "fail" in sys.argv and comm.rank == 2:
    raise ValueError("of rank 2")
if comm.rank == 0:
    print(places)
"""


def launch(cluster: Cluster, *words: object) -> str:
    """Run it on the first host; what it printed."""
    ssh = cluster.folder / "ssh"
    variables = {
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": ssh,
        "UCX_TLS": "tcp,self",  # else it finds out that the hosts are one machine
        "PRTE_MCA_plm_ssh_agent": ssh,
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "CHAINERMN_X": "a b;'c'",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{sys.prefix}/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    }
    setting = [f"{name}={value}" for name, value in variables.items()]
    command = (sys.executable, "-m", "chainermn_tools", "launch", *words)
    return cluster.run(cluster.hosts[0], "env", *setting, *command, seconds=SECONDS)


def test_ranks_of_all_hosts_say_goodbye(cluster, tmp_path):
    folder = tmp_path / "a folder; of 'mine'"
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(SCRIPT)
    arguments = ["a b", "'", "$(id)", ":"]
    printed = launch(cluster, "--hosts", "alpha,beta", "-n", 4, script, *arguments)
    place = [(host, arguments, "a b;'c'") for host in ("alpha", "alpha", "beta", "beta")]
    assert printed.strip() == str(place)


def test_a_failure_on_another_host_is_shown_and_nothing_stays_there(cluster, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("alpha slots=2\nbeta slots=2\n")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        launch(cluster, "--hostfile", tmp_path / "hosts", tmp_path / "script.py", "fail")
    assert failed.value.returncode == 1
    assert "rank 2 on beta failed first: ValueError: of rank 2" in failed.value.stderr
    end = time.monotonic() + SECONDS
    while cluster.processes() and time.monotonic() < end:
        time.sleep(0.1)
    assert not cluster.processes()

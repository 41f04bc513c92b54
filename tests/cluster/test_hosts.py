"""The hosts themselves, and jobs on those that lack something."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.support.hosts.virtual_hosts import Cluster
from tests.support.jobs.processes import soon
from tests.support.jobs.runner import PRELUDE

TWO = {"alpha": 2, "beta": 2}
TRAFFIC = ("tc", "-s", "qdisc", "show", "dev", "eth0")
# As little as MPICH itself starts with, for two ranks a host.
LITTLE_SHM = "4m"


def test_hosts_have_their_own_names_memory_and_processes(cluster):
    cluster.run("alpha", "touch", "/dev/shm/mine")
    for host in cluster.hosts:
        assert cluster.run(host, "hostname").strip() == host
        assert len(cluster.run(host, "sh", "-c", "ls -d /proc/[0-9]*").split()) < 9
        assert ("mine" in cluster.run(host, "ls", "/dev/shm")) == (host == "alpha")
    cluster.run("alpha", "rm", "/dev/shm/mine")
    assert not Path("/dev/shm/mine").exists()


def test_a_limit_shapes_what_every_host_sends_mpis_messages_too(cluster, tmp_path):
    def shapes():
        return [cluster.run(host, *TRAFFIC) for host in cluster.hosts]

    path = tmp_path / "script.py"
    path.write_text(f"""{PRELUDE}
import numpy as np
from mpi4py import MPI
MPI.COMM_WORLD.Bcast(np.zeros(2_500_000, np.uint8))
""")
    cluster.limit("40mbit")
    try:
        for shape in shapes():
            assert "tbf" in shape, shapes()
            assert "rate 40Mbit" in shape, shapes()
        job = cluster.job({"alpha": 1, "beta": 1}, path)
        assert job.returncode == 0, job
        assert int(re.findall(r"Sent (\d+) bytes", shapes()[0])[0]) > 2_500_000
    finally:
        cluster.limit(None)
    for shape in shapes():
        assert "tbf" not in shape, shapes()


@pytest.mark.full
def test_a_job_that_hangs_prints_the_stacks_of_all_hosts(cluster, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(f"""{PRELUDE}
import time
from mpi4py import MPI
def stay_on_this_host():
    time.sleep(1000)
stay_on_this_host()
""")
    job = cluster.job({"alpha": 1, "beta": 1}, path, seconds=120)  # to start takes some
    assert job.returncode is None
    assert job.err.count("in stay_on_this_host") == 2, job
    assert soon(lambda: not cluster.processes()), cluster.processes()


@pytest.mark.parametrize(
    "name", ["hierarchical", pytest.param("two_dimensional", marks=pytest.mark.full)]
)
def test_a_host_with_little_shared_memory_uses_mpi_and_one_line_says_so(
    cluster, tmp_path, name
):
    path = tmp_path / "script.py"
    path.write_text(f"""{PRELUDE}
import numpy as np
from tests.support.worlds.models import with_grads
from chainermn_comm import create_communicator
with create_communicator({name!r}) as comm:
    for call in range(2):
        model = with_grads(w=np.full(1_000_000, comm.rank + call, "float32"))
        comm.allreduce_grad(model)
        assert (model["w"].grad == 1.5 + call).all()
print("right")
""")
    with cluster.shm("beta", LITTLE_SHM):
        job = cluster.job(TWO, path)
    assert job.returncode == 0, job
    assert job.out.count("right") == 4
    assert job.err.count("no room for shared memory in /dev/shm") == 1, job
    assert job.err.count("ChainerMN") == 1, job


def test_nothing_is_left_of_hosts_even_if_one_fails_to_start(cluster):
    devices = set(psutil.net_if_addrs())
    children = set(psutil.Process().children())
    with Cluster(("one", "two")) as others:
        # Beside those of the whole run.
        assert others.run("two", "hostname").strip() == "two"
        assert set(psutil.net_if_addrs()) == devices
        assert all(map(psutil.pid_exists, others.inits.values()))
    assert not any(map(psutil.pid_exists, others.inits.values()))
    assert not others.folder.exists()
    with pytest.raises(RuntimeError, match="hostname: name too long"):
        Cluster(("one", "x" * 99))
    assert set(psutil.Process().children()) == children

"""Where shared memory is short, gradients go through MPI, and no rank dies of it."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

from tests.support.jobs import runner

COMMUNICATORS = 12
# For few of their windows: 4 MiB each, up to 11 for MPI, and 8 that must stay free.
FEW_MIB = 38
MOUNT = (
    'mount --make-rprivate / && mount -t tmpfs -o size=$0m tmpfs /dev/shm && exec "$@"'
)
SMALL = ["unshare", "--mount", "sh", "-c", MOUNT]
RANKS = 32  # that many on a machine, and Docker's default
DOCKER_MIB = 64
SECONDS = 120.0  # ends MPICH's wait where it has too little
MANY = (
    f"COMMUNICATORS = {COMMUNICATORS}"
    + """
import os
from mpi4py import MPI  # which takes its own memory now
from chainermn_comm import create_communicator
from tests.support.worlds.models import check_mean

free = [os.statvfs("/dev/shm")]
comms = [create_communicator() for _ in range(COMMUNICATORS)]  # of 4 MiB each
for comm in comms:
    check_mean(comm, 300_000)
for comm in comms:
    check_mean(comm, 200_000, calls=20)
    comm.finalize()
free.append(os.statvfs("/dev/shm"))
print("FREE", *[one.f_bavail * one.f_frsize >> 20 for one in free], flush=True)
"""
)
ONE = """
from chainermn_comm import create_communicator
from tests.support.worlds.models import check_mean
comm = create_communicator()
check_mean(comm, 300_000)
comm.finalize()
print("RIGHT", flush=True)
"""


@pytest.fixture(autouse=True)
def _mounts_a_small_shm():
    """Skip where this machine can't."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare (Debian: apt-get install util-linux)")
    command = [*SMALL, str(FEW_MIB), "true"]
    tried = runner.run_command(command, runner.variables(), runner.SECONDS)
    if tried.returncode:
        pytest.skip(f"no right to mount a small /dev/shm: {tried.err.strip()}")


def run(folder, script, mib, ranks):
    """The job of a script on that many ranks, where /dev/shm has so many MiB."""
    path = folder / "script.py"
    path.write_text(runner.PRELUDE + script)
    mpiexec = [runner.MPIEXEC, "-n", ranks, sys.executable, path]
    command = [*SMALL, str(mib), *map(str, mpiexec)]
    return runner.run_command(command, runner.variables(), SECONDS)


@pytest.mark.ci
def test_many_communicators_take_what_is_there_and_give_it_back(tmp_path):
    job = run(tmp_path, MANY, FEW_MIB, 2)
    assert job.returncode == 0, job
    assert 0 < job.err.count("no room for shared memory") < COMMUNICATORS, job
    found = re.findall(r"^FREE (\d+) (\d+)$", job.out, re.M)
    assert len(found) == 2, job
    for before, after in found:
        assert int(after) >= int(before) - 1, job  # windows are gone


@pytest.mark.ci
@pytest.mark.parametrize(("ranks", "is_told"), [(12, False), (13, True)])
def test_ranks_that_need_more_than_there_is_are_told(ranks, is_told):
    """MPICH needs 5 MB for each rank of a machine, as its mpiexec counts them."""
    of_mpiexec = {"MPI_LOCALNRANKS": str(ranks), "MPI_LOCALRANKID": "0"}
    command = [*SMALL, str(DOCKER_MIB), sys.executable, "-c", ONE]
    job = runner.run_command(command, runner.variables(of_mpiexec), SECONDS)
    assert "RIGHT" in job.out, job
    assert ("and MPICH needs 65 MB for 13 ranks" in job.err) == is_told, job

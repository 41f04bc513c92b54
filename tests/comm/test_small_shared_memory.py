"""Where shared memory is short, gradients go through MPI, and no rank dies of it."""

from __future__ import annotations

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
SMALL = ["unshare", "--mount", "sh", "-c", MOUNT, str(FEW_MIB)]
CHAINERMN = str(runner.MPIEXEC.parent / "chainermn")
RANKS, DOCKER_MIB = 32, 64  # that many on a machine, and Docker's default
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


def lacking() -> str:
    """What this machine lacks to mount a small /dev/shm; "" if nothing."""
    if not shutil.which("unshare"):
        return "no unshare (Debian: apt-get install util-linux)"
    tried = runner.run_command([*SMALL, "true"], runner.variables(), runner.SECONDS)
    return f"no right to mount: {tried.err.strip()}" if tried.returncode else ""


@pytest.mark.ci
def test_many_communicators_take_what_is_there_and_give_it_back(tmp_path):
    if why := lacking():
        pytest.skip(f"no small /dev/shm can be had here: {why}")
    path = tmp_path / "script.py"
    path.write_text(runner.PRELUDE + MANY)
    command = [
        *SMALL,
        str(runner.MPIEXEC),
        "-n",
        "2",
        sys.executable,
        str(path),
    ]
    job = runner.run_command(command, runner.variables(), runner.SECONDS)
    assert job.returncode == 0, job
    assert 0 < job.err.count("no room for shared memory") < COMMUNICATORS, job
    frees = [
        line.split()[1:] for line in job.out.splitlines() if line.startswith("FREE")
    ]
    assert len(frees) == 2, job
    # Windows are gone.
    assert all(int(after) >= int(before) - 1 for before, after in frees), job


def start_many(folder, mib):
    path = folder / "script.py"
    path.write_text(runner.PRELUDE + ONE)
    command = [
        *SMALL[:-1],
        str(mib),
        str(runner.MPIEXEC),
        "-n",
        str(RANKS),
        sys.executable,
        str(path),
    ]
    return runner.run_command(command, runner.variables(), SECONDS)


@pytest.mark.full
def test_many_ranks_in_a_container_of_docker_s_default_are_told_to_give_it_more(
    tmp_path,
):
    """MPICH itself ends by a signal without a word, or waits; Open MPI takes what is there."""
    if why := lacking():
        pytest.skip(f"no small /dev/shm can be had here: {why}")
    job = start_many(tmp_path, DOCKER_MIB)
    assert job.err.count("docker run --shm-size=1g") == 1, job
    if runner.on_open_mpi():
        assert job.out.count("RIGHT") == RANKS, job
        return
    assert job.returncode != 0, job
    log = tmp_path / "job.log"
    log.write_text(job.err)
    told = runner.run_command(
        [CHAINERMN, "explain", str(log)], runner.variables(), runner.SECONDS
    )
    assert "docker run --shm-size=1g ...   # or --ipc=host" in told.out, told


@pytest.mark.full
def test_many_ranks_whose_windows_have_no_room_are_told_to_give_the_container_more(
    tmp_path,
):
    if why := lacking():
        pytest.skip(f"no small /dev/shm can be had here: {why}")
    job = start_many(tmp_path, 200)
    assert job.returncode == 0, job
    assert job.out.count("RIGHT") == RANKS, job
    assert job.err.count("docker run --shm-size=1g") == 1, job

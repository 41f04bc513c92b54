"""Where shared memory is short, gradients go through MPI, and no rank dies of it."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.support import jobs

FEW_MIB = 38  # for few windows of two ranks: 8 MiB each, 11 for MPI, and 8 that must stay free
MOUNT = 'mount --make-rprivate / && mount -t tmpfs -o size=$0m tmpfs /dev/shm && exec "$@"'
MANY = (
    jobs.PRELUDE
    + jobs.CHECK_GRADIENTS
    + """
import os, sys
from chainermn_comm import create_communicator, shared_window

kernel, others = sys.argv[1:]
if kernel == "old":
    shared_window.MADV_POPULATE_WRITE = 999
if others == "take it after the check":
    shared_window.has_room = lambda nbytes: True
free = [os.statvfs("/dev/shm")]
comms = [create_communicator() for _ in range(8)]  # of 4 MiB each
for comm in comms:
    check_gradients(comm)
for comm in comms:
    for _ in range(20):
        model = Model(np.full(200_000, comm.rank, "f4"))
        comm.allreduce_grad(model)
        assert (model.param.grad == 0.5).all()
    comm.finalize()
free.append(os.statvfs("/dev/shm"))
print("FREE", *[one.f_bavail * one.f_frsize >> 20 for one in free], flush=True)
"""
)
FILES = (
    jobs.PRELUDE
    + jobs.CHECK_GRADIENTS
    + """
import os, resource
from chainermn_comm.catalogue import make_communicator
from chainermn_comm.topology import Topology

comm = make_communicator("hierarchical", topology=Topology((0, 0, 1, 1)))
if comm.rank == 0:
    now = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + 2, now + 2))
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
check_gradients(comm)
print("RIGHT", flush=True)
"""
)


@pytest.fixture
def small(tmp_path):
    """Runs a script on two ranks with little shared memory."""
    lacking = missing()
    if lacking:
        pytest.skip(f"no small /dev/shm can be had here: {lacking}")

    def run(text: str, *arguments: str) -> jobs.Job:
        path = tmp_path / "script.py"
        path.write_text(text)
        command = ["unshare", "--mount", "sh", "-c", MOUNT, str(FEW_MIB), str(jobs.MPIEXEC)]
        command += ["-n", "2", sys.executable, str(path), *arguments]
        return jobs.run_command(command, jobs.variables(), jobs.SECONDS)

    return run


def missing() -> str:
    """What this machine lacks to mount a small /dev/shm; "" if nothing."""
    if not shutil.which("unshare"):
        return "no unshare (Debian: apt-get install util-linux)"
    command = ["unshare", "--mount", "sh", "-c", MOUNT, str(FEW_MIB), "true"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return f"no right to mount: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_many_communicators_take_what_is_there(small, kernel):
    job = small(MANY, kernel, "take nothing")
    assert job.returncode == 0, job
    assert 0 < job.err.count("no room for shared memory") < 8, job
    assert job.out.count("FREE") == 2, job


def test_memory_that_others_take_after_the_check_is_missed_in_time(small):
    job = small(MANY, "new", "take it after the check")
    assert job.returncode == 0, job
    assert 0 < job.err.count("no room for shared memory") < 8, job
    frees = [line.split()[1:] for line in job.out.splitlines() if line.startswith("FREE")]
    assert len(frees) == 2, job
    # Windows are gone, those tried in vain too.
    assert all(int(after) >= int(before) - 1 for before, after in frees), job


def test_a_node_that_has_no_file_left_for_a_window(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(FILES)
    job = jobs.run(4, path)
    assert job.returncode == 0, job
    assert job.out.count("RIGHT") == 4, job
    assert job.err.count("shared memory could not be allocated on some node") == 1, job

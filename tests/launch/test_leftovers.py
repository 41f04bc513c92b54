"""However a job ends, no file of its shared windows is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from . import jobs

SHARED = Path("/dev/shm")
# MPI's own, which MPI_Init makes and a killed job leaves (2 MB of MPICH's): no windows.
OF_MPI_ITSELF = ("mpich_shm_", "sm_segment.")
SCRIPT = (
    jobs.PRELUDE
    + jobs.CHECK_GRADIENTS
    + """
import os, sys, time
import numpy as np
from mpi4py import MPI
from chainermn_comm import create_communicator

how = sys.argv[1]
comms = [create_communicator(name) for name in ("hierarchical", "flat", "two_dimensional")]
comms += [comms[0].split(0, 0)]
for comm in comms:
    check_gradients(comm)
names = set(os.listdir("/dev/shm"))
maps = [line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/dev/shm" in line]
files = [os.path.basename(name.removesuffix(" (deleted)")) for name in maps]
print("FILES", *sorted({name for name in files}), flush=True)
world = MPI.COMM_WORLD
world.Barrier()
if how == "finalized":
    for comm in comms:
        comm.finalize()
if how == "one finalized":
    comms[1].finalize()
if how == "left by an exception":
    for comm in comms:
        try:
            with comm:
                raise LookupError("of all ranks")
        except LookupError:
            pass
    with create_communicator("hierarchical") as comm:
        check_gradients(comm)
if how == "exception" and world.rank == 1:
    raise LookupError("of a rank")
if how == "kill" and world.rank == 1:
    os.kill(os.getpid(), 9)
if how == "launcher":
    print("WAITING", flush=True)
if how in ("exception", "kill", "launcher"):
    time.sleep(60)
"""
)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def left_of(out: str) -> list[str]:
    """The files in shared memory that ranks of this job had mapped and that still exist."""
    lines = [line for line in out.splitlines() if line.startswith("FILES")]
    assert lines, out
    names = {name for line in lines for name in line.split()[1:]}
    assert len(names) > 1, "the ranks mapped no window"
    return [n for n in sorted(names) if (SHARED / n).exists() and not n.startswith(OF_MPI_ITSELF)]


@pytest.mark.parametrize(
    "how", ["finalized", "one finalized", "not finalized", "left by an exception"]
)
def test_a_job_that_ends_by_itself(script, how):
    job = jobs.run(2, script, how)
    assert job.returncode == 0, job
    assert left_of(job.out) == []


@pytest.mark.parametrize("how", ["exception", "kill"])
def test_a_rank_that_fails(script, how):
    job = jobs.run(2, script, how)
    assert job.returncode not in (0, None), job
    assert left_of(job.out) == []


def test_a_launcher_that_is_killed(script, tmp_path):
    path = tmp_path / "out"
    with path.open("wb") as out:
        process = subprocess.Popen(
            [jobs.MPIEXEC, "-n", "2", sys.executable, script, "launcher"],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    started = psutil.Process(process.pid)
    try:
        assert soon(lambda: path.read_text().count("WAITING") == 2), path.read_text()
        ours = started.children(recursive=True)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    # MPICH's ranks end too; Open MPI's, which sleep here, hadn't after 30 s.
    soon(lambda: not any(alive(one) for one in ours), 5)
    for one in ours:
        if alive(one):
            one.kill()
    assert soon(lambda: not any(alive(one) for one in ours))
    assert left_of(path.read_text()) == []


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def soon(condition, seconds: float = jobs.SECONDS / 2) -> bool:
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found

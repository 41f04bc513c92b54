"""A job that is killed while arrays are scattered leaves none of their files behind."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.jobs import runner

KILLED = (
    runner.PRELUDE
    + """
import os, signal
import numpy as np
from mpi4py import MPI
from chainermn_comm import create_communicator
from chainermn_train import scatter_dataset

def reserve(*arguments, do=os.posix_fallocate):
    do(*arguments)
    print("filling", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

os.posix_fallocate = reserve
comm = create_communicator("naive", MPI.COMM_WORLD)
scatter_dataset(np.zeros((1000, 1000)) if comm.rank == 0 else None, comm)
"""
)


def ours_in_memory() -> set[str]:
    """What our files would be called in the time that they have a name, if they ever do."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("tmp")}


def test_a_root_that_is_killed_ends_the_job_and_leaves_no_file(tmp_path: Path) -> None:
    """Its ranks sleep until it has filled their files."""
    script, folder = tmp_path / "script.py", tmp_path / "temporary"
    script.write_text(KILLED)
    folder.mkdir()
    before = ours_in_memory()
    job = runner.run(2, script, environment={"TMPDIR": str(folder)}, seconds=150)
    assert "filling" in job.out, job
    assert job.returncode not in (0, None), job
    assert list(folder.iterdir()) == []
    assert ours_in_memory() <= before

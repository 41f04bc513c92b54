"""Worker processes read scattered arrays where they lie; a killed job leaves none behind.

In a world of the default tier, test_scattered_arrays.py has workers of a fork server.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import jobs

SECONDS = 150.0  # four processes import Chainer on a machine that may be busy

WORKERS = (
    jobs.PRELUDE
    + """
import multiprocessing, os, sys
import numpy as np
from chainer.iterators import MultiprocessIterator
from tests.support.mapped import Reporting, lies_in

def main():
    method = sys.argv[1]
    multiprocessing.set_start_method(method)
    import pickle
    from mpi4py import MPI
    from chainermn_comm import create_communicator
    from chainermn_train import scatter_dataset

    os.environ["MPI4PY_RC_INITIALIZE"] = "0"  # workers that import mpi4py must not start MPI
    with create_communicator("naive", MPI.COMM_WORLD) as comm:
        whole = np.arange(6000.0).reshape(60, 100) if comm.rank == 0 else None
        part = scatter_dataset(whole, comm, force_equal_length=False)
        expected = np.arange(6000.0).reshape(60, 100)[comm.rank * 30 : comm.rank * 30 + 30]
        pickle.dumps(part)  # puts rank 0's own into a file too: the forked see it there
        iterator = MultiprocessIterator(
            Reporting(part), 10, repeat=False, shuffle=False, n_processes=1
        )
        examples = [example for batch in iterator for example in batch]
        iterator.finalize()
        assert (np.stack([x for x, _, _ in examples]) == expected).all()
        # Chainer's iterator makes the first batch itself, to see how large it is.
        assert os.getpid() not in {pid for _, pid, _ in examples[10:]}
        assert {file for _, _, file in examples} == {lies_in(part[0])}
        assert lies_in(part[0])[1] != "0"  # a file's memory, and no copy
        assert comm.allreduce_obj(1) == 2
    print("right", flush=True)

if __name__ == "__main__":
    main()
"""
)


@pytest.mark.full
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_read_the_same_memory(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    root = str(Path(__file__).parents[2])
    job = jobs.run(2, script, method, environment={"PYTHONPATH": root}, seconds=SECONDS)
    assert (job.returncode, job.out.count("right")) == (0, 2), job


KILLED = (
    jobs.PRELUDE
    + """
import os, signal
import numpy as np
from mpi4py import MPI
from chainermn_comm import create_communicator
from chainermn_train import scatter_dataset

def pwrite(descriptor, data, offset, write=os.pwrite):
    if len(data) > 1000:  # the first rows, and no mark
        print("filling", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(descriptor, data, offset)

os.pwrite = pwrite
comm = create_communicator("naive", MPI.COMM_WORLD)
scatter_dataset(np.zeros((1000, 1000)) if comm.rank == 0 else None, comm)
"""
)


def test_a_root_that_is_killed_ends_the_job_and_leaves_no_file(tmp_path: Path) -> None:
    """Its ranks sleep until it has filled their files."""
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    folder = tmp_path / "temporary"
    folder.mkdir()
    before = ours_in_memory()
    job = jobs.run(2, script, environment={"TMPDIR": str(folder)}, seconds=SECONDS)
    assert "filling" in job.out, job
    assert job.returncode not in (0, None), job
    assert list(folder.iterdir()) == []
    assert ours_in_memory() <= before


def ours_in_memory() -> set[str]:
    """What our files would be called in the time that they have a name, if they ever do."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("tmp")}

"""Worker processes under MPI: one line has them started without a fork, and a fork is warned of."""

from __future__ import annotations

import multiprocessing

import pytest

from chainermn_train import use_forkserver
from tests.support.jobs.runner import PRELUDE, run

# Importing it starts MPI: what a script does at its top, a worker does again.
SCRIPT = (
    PRELUDE
    + """\
import multiprocessing, sys, warnings
import numpy as np
from mpi4py import MPI
import chainermn
from chainer.iterators import MultiprocessIterator, SerialIterator
from chainermn.iterators import create_multi_node_iterator
from chainermn.iterators import create_synchronized_iterator, use_forkserver

class Where:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        where = multiprocessing.get_start_method(), MPI.Is_initialized()
        return index, np.random.rand(), *where

def main():
    [use_forkserver() for _ in range(2)]
    comm = chainermn.create_communicator("naive")
    create_multi_node_iterator(SerialIterator(Where(), 2), comm)
    with create_multi_node_iterator(MultiprocessIterator(Where(), 2, n_processes=1), comm):
        pass
    workers = MultiprocessIterator(Where(), 2, n_processes=2, shuffle=False)
    with create_synchronized_iterator(workers, comm) as iterator:
        found = [next(iterator) for _ in range(4)]
    assert [index for batch in found for index, *_ in batch] == list(range(8))
    drawn = {number for batch in found[1:] for _, number, *_ in batch}
    assert len(drawn) == 6
    # The first batch is made in the process itself.
    methods = {tuple(where) for batch in found[1:] for _, _, *where in batch}
    print(comm.rank, sorted(methods), flush=True)

if __name__ == "__main__":
    main()
"""
)


def launch(folder, text):
    script = folder / "script.py"
    script.write_text(text)
    job = run(
        2, script, environment={"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "1"}, seconds=300
    )
    assert job.returncode == 0, job
    return job


@pytest.mark.ci
def test_one_line_keeps_workers_from_being_forked_and_from_mpi(tmp_path):
    job = launch(tmp_path, SCRIPT)
    rows = sorted(job.out.splitlines())
    assert rows == [f"{rank} [('forkserver', False)]" for rank in (0, 1)]
    assert "Warning" not in job.err


PLAIN = (
    PRELUDE
    + """\
import multiprocessing, subprocess, sys
import chainermn, numpy as np
from chainer.iterators import MultiprocessIterator

def main():
    multiprocessing.set_start_method("fork")
    comm = chainermn.create_communicator("naive")
    subprocess.run([sys.executable, "-c", ""], check=True, preexec_fn=lambda: None)
    print(comm.rank, "has run a program", file=sys.stderr, flush=True)
    comm.allreduce_obj(1)
    part = chainermn.scatter_dataset(np.arange(16) if comm.rank == 0 else None, comm)
    for _ in range(2):
        with MultiprocessIterator(part, 2, n_processes=1) as iterator:
            [next(iterator) for _ in range(3)]
    comm.allreduce_obj(1)

if __name__ == "__main__":
    main()
"""
)


def test_a_fork_by_a_plain_iterator_is_warned_of_once_but_no_program(tmp_path):
    job = launch(tmp_path, PLAIN)
    before, after = job.err.split("0 has run a program")
    assert "about to fork" not in before
    assert after.count("RuntimeWarning: multiprocessing is about to fork") == 1, job
    assert after.count("about to fork") == 1
    assert "use_forkserver()" in after


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_too_late_is_told(method):
    multiprocessing.set_start_method(method, force=True)
    try:
        with pytest.raises(
            RuntimeError, match=f"by {method!r} already; call it first of all"
        ):
            use_forkserver()
    finally:
        multiprocessing.set_start_method(None, force=True)

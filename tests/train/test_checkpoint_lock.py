"""One job at a time saves under a name."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
import warnings
from contextlib import contextmanager

import pytest

from tests.support.jobs.processes import soon
from tests.support.jobs.runner import variables
from tests.support.oracles.raised import raises_on_all
from tests.support.plugins.pairwise import in_full
from tests.support.training.checkpoints import (
    contents,
    link,
    loaded,
    make_checkpointer,
    save_and_flush,
    saved,
)

world = pytest.mark.world
pytestmark = pytest.mark.usefixtures("unsynced")

GRACE = "CHAINERMN_GRACE"


@world
@pytest.mark.parametrize("call", ["save", "finalize"])
def test_a_second_job_is_refused_on_all_ranks(naive, folder, monkeypatch, call):
    """Also where it has only loaded, and would remove what the first one saves."""
    monkeypatch.setenv(GRACE, "0.2")
    saved(naive, folder, 10)
    checkpointer = make_checkpointer(naive, folder)
    target = link(0, 0)
    checkpointer.maybe_load(target)
    arguments = ()
    if call == "save":
        arguments = (target,)
    text = (
        r"another job saves under this name: host9, process 7, since noon, says .*run.lock; it "
        r"has not ended within 0.2 s \(CHAINERMN_GRACE\)"
    )
    with (folder / "run.lock").open("a+") as file:
        if naive.rank == 0:  # it locks as another job does
            file.truncate(0)
            file.write("host9, process 7, since noon")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
        before = contents(naive, folder)
        with raises_on_all(naive.rank == 0, ValueError, text):
            getattr(checkpointer, call)(*arguments)
        assert contents(naive, folder) == before
    naive.allgather_obj(None)
    getattr(checkpointer, call)(*arguments)  # the other one has ended


@world
@pytest.mark.parametrize("code", ["ENOLCK", "EOPNOTSUPP"])
def test_without_locks_one_warning_says_so(naive, folder, monkeypatch, code):
    def refuse(*_):
        raise OSError(getattr(errno, code), "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    checkpointer = make_checkpointer(naive, folder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for iteration in (10, 20):
            checkpointer.save(link(iteration, naive.rank), iteration)
    texts = [str(each.message) for each in told]
    assert len(texts) == (naive.rank == 0)
    for text in texts:
        assert "has no locks: nobody notices if two jobs" in text
    assert loaded(naive, folder) == [20, naive.rank]


# Jobs of one rank, each a process of its own.

JOB = """
import os, sys, time
from pathlib import Path
from chainermn_comm import create_communicator
from tests.support.training.checkpoints import link, make_checkpointer

folder, end = map(Path, sys.argv[1:])
comm = create_communicator("naive")
checkpointer = make_checkpointer(comm, folder)
checkpointer.save(link(1, 1), 10)
child = os.fork()
if not child:  # a worker process, which outlives its parent
    while not end.with_suffix(".worker").exists():
        time.sleep(0.01)
    os._exit(0)
print("SAVED", child, flush=True)
while not end.exists():
    time.sleep(0.01)
"""


@contextmanager
def job(folder, end):
    """A job that has saved, goes on until ``end`` is there, and has a worker process."""
    command = [sys.executable, "-c", JOB, folder, end]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=variables()
    ) as process:
        try:
            assert process.stdout.readline().startswith("SAVED"), process.poll()
            yield process
        finally:
            process.kill()
            end.with_suffix(".worker").touch()


@pytest.fixture
def alone():
    from chainermn_comm import create_communicator

    with create_communicator("naive") as comm:
        yield comm


@pytest.mark.parametrize("how", ["killed", *in_full("ended")])
def test_a_job_is_waited_for_and_a_dead_one_blocks_nobody(
    tmp_path, alone, monkeypatch, how
):
    """Though its worker process lives on."""
    monkeypatch.setenv(GRACE, "0.5")
    folder = tmp_path / "run"
    end = tmp_path / "end"
    checkpointer = make_checkpointer(alone, folder)
    with job(folder, end) as process:
        (folder / "run.0.20.tmp").touch()  # it writes this
        assert checkpointer.maybe_load(link(0, 0)) == 10
        name = re.escape(f"{socket.gethostname()}, process {process.pid}, since 20")
        with pytest.raises(ValueError, match=name):
            checkpointer.save(link(0, 0), 20)
        assert (folder / "run.0.20.tmp").exists()
        monkeypatch.setenv(GRACE, "60")
        if how == "ended":
            end.touch()  # which it sees after a while
        else:
            process.kill()
        save_and_flush(checkpointer, 20)
        words = f"{socket.gethostname()}, process {os.getpid()}, since "
        assert (folder / "run.lock").read_text().startswith(words)
        process.wait(60)
    checkpointer.finalize()
    assert soon(lambda: not os.listdir(folder))

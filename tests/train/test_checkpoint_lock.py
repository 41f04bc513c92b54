"""A load changes nothing on disk, and one job at a time saves under a name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
import threading
import warnings

import pytest

from chainermn_comm import PeerError
from tests.support.jobs.processes import soon
from tests.support.jobs.runner import run_text, variables
from tests.support.training.checkpoints import (
    generation,
    link,
    loaded,
    make_checkpointer,
    make_trainer,
    on_rank_0,
    save_and_flush,
    saved,
)

world = pytest.mark.world
pytestmark = pytest.mark.usefixtures("unsynced")

GRACE = "CHAINERMN_GRACE"
# Such as a job leaves that was killed while it wrote.
LEFTOVERS = ("run.0.30.tmp", "run.7.20.tmp", "run.1.20-2.tmp")


def contents(comm, folder):
    """All that is in a folder, by name, seen by all ranks before any goes on (collective)."""
    comm.allgather_obj(None)
    found = {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (folder.iterdir() if folder.is_dir() else ())
    }
    comm.allgather_obj(None)
    return found


def leave_behind(comm, folder):
    folder.mkdir(exist_ok=True)
    for name in LEFTOVERS:
        on_rank_0(comm, (folder / name).touch)


@world
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_load_changes_nothing_on_disk(naive, folder, elsewhere):
    place = folder / "place"
    trainer, _, checkpointer = make_trainer(naive, place, every=0)
    assert checkpointer.maybe_load(trainer) is None
    assert contents(naive, place) == {}  # nor is the folder made
    saved(naive, place, 10, 20)
    leave_behind(naive, place)
    before = contents(naive, place)
    path = place if elsewhere else None
    checkpointer = make_checkpointer(naive, folder if elsewhere else place)
    assert checkpointer.maybe_load(link(0, 0), path=path) == 20
    assert contents(naive, place) == before


@world
def test_leftovers_go_when_a_save_begins(naive, folder):
    saved(naive, folder, 10)
    leave_behind(naive, folder)
    others = ("run2.0.20.tmp", "run.0.20.tmp.tmp", "other.tmp")
    for name in others:
        on_rank_0(naive, (folder / name).touch)
    checkpointer = make_checkpointer(naive, folder)
    checkpointer.maybe_load(link(0, 0))
    checkpointer.save(link(1, naive.rank), 20)
    left = {"run.lock", *others, *generation(naive, 10, 20)}
    assert contents(naive, folder).keys() == left
    checkpointer.finalize()
    assert contents(naive, folder).keys() == {*others}


@contextlib.contextmanager
def locked(comm, folder):
    """Rank 0 locks as another job does."""
    with contextlib.ExitStack() as stack:
        if comm.rank == 0:
            file = stack.enter_context((folder / "run.lock").open("w"))
            file.write("host9, process 7, since noon")
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
        comm.allgather_obj(None)
        yield


@world
def test_a_second_job_is_refused_on_all_ranks(naive, folder, monkeypatch):
    monkeypatch.setenv(GRACE, "0.2")
    saved(naive, folder, 10)
    leave_behind(naive, folder)
    checkpointer = make_checkpointer(naive, folder)
    text = (
        r"another job saves under this name: host9, process 7, since noon, says .*run.lock; it "
        r"has not ended within 0.2 s \(CHAINERMN_GRACE\)"
    )
    with locked(naive, folder):
        before = contents(naive, folder)
        for _ in range(2):
            raised = PeerError if naive.rank else ValueError
            with pytest.raises(raised, match=text):
                checkpointer.save(link(1, naive.rank), 20)
        assert contents(naive, folder) == before
    naive.allgather_obj(None)
    checkpointer.save(link(20, naive.rank), 20)  # the other one has ended
    del checkpointer
    assert loaded(naive, folder) == [20, naive.rank]


@world
def test_who_has_only_loaded_does_not_remove_what_another_job_saves(
    naive, folder, monkeypatch
):
    monkeypatch.setenv(GRACE, "0.2")
    saved(naive, folder, 10)
    checkpointer = make_checkpointer(naive, folder)
    checkpointer.maybe_load(link(0, 0))
    with locked(naive, folder):
        before = contents(naive, folder)
        raised = PeerError if naive.rank else ValueError
        with pytest.raises(raised, match="another job saves under this name"):
            checkpointer.finalize()
        assert contents(naive, folder) == before


@world
@pytest.mark.parametrize("code", ["ENOLCK", "EOPNOTSUPP"])
def test_without_locks_one_warning_says_so(naive, folder, monkeypatch, code):
    def refuse(*_):
        raise OSError(getattr(errno, code), "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    leave_behind(naive, folder)
    checkpointer = make_checkpointer(naive, folder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for iteration in (10, 20):
            checkpointer.save(link(iteration, naive.rank), iteration)
    texts = [str(each.message) for each in told]
    assert len(texts) == (naive.rank == 0)
    assert all("has no locks: nobody notices if two jobs" in text for text in texts)
    kept = contents(naive, folder).keys()
    assert {
        *LEFTOVERS,
        *generation(naive, 10, 20),
    } <= kept  # a living process may write
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


@contextlib.contextmanager
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


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_a_job_is_waited_for_and_a_dead_one_blocks_nobody(
    tmp_path, alone, monkeypatch, how
):
    """Though its worker process lives on."""
    monkeypatch.setenv(GRACE, "0.5")
    folder, end = tmp_path / "run", tmp_path / "end"
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


WAITS = """
import sys
from pathlib import Path
from chainermn_comm import create_communicator
from tests.support.training.checkpoints import link, make_checkpointer

comm = create_communicator("naive")
make_checkpointer(comm, Path(sys.argv[1])).save(link(2, 2), 20)
print("WAITED", flush=True)
"""


@pytest.mark.ci
def test_ranks_that_wait_for_another_job_are_in_no_call_that_waits(tmp_path):
    folder, end = tmp_path / "run", tmp_path / "end"
    environment = {"CHAINERMN_TIMEOUT": "2", GRACE: "60"}
    with job(folder, end):
        ends = threading.Timer(6, end.touch)
        ends.start()
        done = run_text(2, WAITS, folder, environment=environment)
        assert end.exists()  # else nothing was waited for
    assert done.returncode == 0, done
    assert done.out.count("WAITED") == 2

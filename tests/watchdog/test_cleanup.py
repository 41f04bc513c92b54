"""However a job ends, no process, shared memory or temporary file of it is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from chainermn_comm.watchdog.monitor import cleanup
from chainermn_comm.watchdog.monitor.cleanup import SharedFiles
from tests.support.jobs import runner
from tests.support.jobs.processes import is_gone, soon
from tests.support.plugins.pairwise import in_full

SHARED = Path("/dev/shm")
SCRIPT = f"""{runner.CHECK_GRADIENTS}
import atexit, contextlib, multiprocessing, os, subprocess, sys, threading, time
import numpy as np
from mpi4py import MPI
from chainermn_comm import create_communicator
from tests.support.watchdog.records import communicator_within

WELL = ("finalized", "one finalized", "not finalized", "left by an exception")
how = sys.argv[1]
if how == "not finalized":
    # Registered before the communicators are there, so called after all that belongs to them.
    atexit.register(lambda: print("LAST", comms[0].allreduce_obj(1), flush=True))
comms = [communicator_within("hierarchical", 0.0 if how == "kill, no time-out" else 2.0)]
comms += [*map(create_communicator, ("flat", "two_dimensional")), comms[0].split(0, 0)]
for comm in comms:
    check_gradients(comm)
lock = multiprocessing.get_context("spawn").Lock()  # a named semaphore
if how not in WELL:
    child = subprocess.Popen(["sleep", "1000"])
    print("CHILD", child.pid, flush=True)
maps = [line.split(None, 5)[4:] for line in open("/proc/self/maps") if "/dev/shm" in line]
inodes = {{int(inode) for inode, _ in maps}}
files = {{os.path.basename(name.strip().removesuffix(" (deleted)")) for _, name in maps}}
files |= {{entry.name for entry in os.scandir("/dev/shm") if entry.inode() in inodes}}
print("FILES", *sorted(files), flush=True)
world = MPI.COMM_WORLD
world.Barrier()
if world.rank == 1:  # until the monitor warns of the call of rank 0, before which it saw the files
    if how == "kill, no time-out":  # and no warning: it has seen the files by then
        time.sleep(2.0)
    while how != "kill, no time-out" and not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
comms[0].bcast_obj(None, root=1)
if how == "finalized":
    for comm in comms:
        comm.finalize()
if how == "one finalized":
    comms[1].finalize()
if how == "left by an exception":
    for comm in comms:
        with contextlib.suppress(LookupError), comm:
            raise LookupError("of all ranks")
    with create_communicator("hierarchical") as comm:
        check_gradients(comm)
if how == "not finalized":
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
if how == "exception" and world.rank == 1:
    raise LookupError("of a rank")
if how.startswith("kill") and world.rank == 1:
    os.kill(os.getpid(), 9)
if how == "abort" and world.rank == 1:
    world.Abort(5)
if how == "all killed":
    os.kill(os.getpid(), 9)
if how == "abort in vain" and world.rank == 1:
    from tests.support.worlds.planted import abort_in_vain
    abort_in_vain()  # as after a cut link: the monitor ends the ranks
if how == "launcher":
    print("WAITING", flush=True)
if how not in WELL:
    time.sleep(1000)
"""


def left_of(job, folder):
    """What a job had and that is still there, once the monitor had the time to clean up."""
    lines = [line.split() for line in job.out.splitlines()]
    names = {name for line in lines if line[:1] == ["FILES"] for name in line[1:]}
    assert len(names) > 1, f"the ranks mapped no window\n{job}"
    assert any(name.startswith("sem.mp-") for name in names), job
    pids = [int(line[1]) for line in lines if line[:1] == ["CHILD"]]

    def found():
        files = [name for name in sorted(names) if (SHARED / name).exists()]
        return [*files, *filter(psutil.pid_exists, pids), *folder.iterdir()]

    soon(lambda: not found())
    return found()


@pytest.fixture
def folder(tmp_path):
    """For the job's temporary files alone."""
    path = tmp_path / "folder"
    path.mkdir()
    return path


def run(how, folder, then=None):
    """Run the script, whose ranks go on once the monitor has warned."""
    warned = folder.with_name("warned")

    def meanwhile(launcher, said):
        if "has waited" in said()[1]:
            warned.touch()
        if then is not None:
            then(launcher, said)

    environment = {"TMPDIR": str(folder)}
    return runner.run_text(
        2, SCRIPT, how, warned, environment=environment, meanwhile=meanwhile
    )


@pytest.mark.parametrize(
    "how",
    ["not finalized", *in_full("finalized", "one finalized", "left by an exception")],
)
def test_a_job_that_ends_by_itself(how, folder):
    job = run(how, folder)
    assert job.returncode == 0, job
    if how == "not finalized":  # MPI ends after all of Python's exit functions
        assert job.out.count("LAST 2") == 2, job
        assert job.err.count("Exception in thread") == 2, job
    assert left_of(job, folder) == []


@pytest.mark.parametrize(
    "how",
    [
        "exception",
        "kill",
        "kill, no time-out",
        *in_full("all killed", "abort", "abort in vain"),
    ],
)
def test_a_rank_that_fails(how, folder):
    job = run(how, folder)
    assert job.returncode not in (0, None), job
    assert left_of(job, folder) == []


def test_a_launcher_that_is_killed(folder):
    from mpi4py import MPI

    ours = []

    def kill_launcher(launcher, said):
        if not ours and said()[0].count("WAITING") == 2:
            ours.extend(psutil.Process(launcher).children(recursive=True))
            os.kill(launcher, signal.SIGKILL)

    job = run("launcher", folder, kill_launcher)
    assert ours, job
    # Its ranks, which sleep here, hadn't ended after 30 s.
    if MPI.get_vendor()[0] == "Open MPI":
        for one in ours:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        for left in folder.glob("ompi.*"):  # docs/failures.md tells of it
            shutil.rmtree(left)
    for one in ours:
        assert is_gone(one.pid)
    assert left_of(job, folder) == []


MAPPED = """
import mmap, sys
files = [open(name, "r+b") for name in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 0) for file in files]
print("MAPPED", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared_file():
    """Makes a file in shared memory."""
    made = []

    def make(name):
        path = SHARED / f"{name}{os.getpid()}"
        path.write_bytes(b"x")
        made.append(path)
        return path

    yield make
    for path in made:
        path.unlink(missing_ok=True)


@contextmanager
def mapping(*files):
    """A process that has mapped these files."""
    command = [sys.executable, "-c", MAPPED, *files]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"MAPPED\n"
        yield process.pid
        process.communicate(timeout=runner.SECONDS)


def test_what_others_use_or_own_is_not_removed(shared_file, monkeypatch):
    mine = shared_file("sem.mp-mine")
    shared = shared_file("sem.mp-shared")
    users = [shared_file("dataset"), shared_file("psm_mine")]
    unknown = shared_file("mpich_shm_unknown")
    files = SharedFiles()
    with mapping(shared):  # as a process that the rank left behind
        with mapping(mine, shared, *users) as rank:
            files.scan_if_due([rank], 0.0)
            assert not files.remove()
            assert mine.exists()
        assert not files.remove()
        assert not mine.exists()
        assert shared.exists()
    with monkeypatch.context() as patched:  # no descriptor is left to see who uses it
        patched.setattr(cleanup, "_mapped", refuse)
        assert not files.remove()
    with monkeypatch.context() as patched:  # it is another user's
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        again = SharedFiles()
        again._inodes = dict(files._inodes)
        assert again.remove()
    assert shared.exists()
    assert files.remove()
    assert not shared.exists()
    for path in (*users, unknown):
        assert path.exists()


def refuse(_):
    raise OSError(24, "Too many open files")

"""However a job ends, no process, shared memory or temporary file of it is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from chainermn_comm.watchdog.monitor import cleanup
from chainermn_comm.watchdog.monitor.cleanup import SharedFiles
from tests.support.jobs import runner
from tests.support.jobs.processes import is_gone, is_running, soon
from tests.support.plugins.pairwise import in_full
from tests.support.watchdog.records import birth

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


def left_of(job: runner.Job, folder: Path) -> list[object]:
    """What a job had and that is still there, once the monitor had the time to clean up."""
    lines = [line.split() for line in job.out.splitlines()]
    names = {name for line in lines if line[:1] == ["FILES"] for name in line[1:]}
    assert len(names) > 1, f"the ranks mapped no window\n{job}"
    assert any(name.startswith("sem.mp-") for name in names), job
    pids = [int(line[1]) for line in lines if line[:1] == ["CHILD"]]

    def found() -> list[object]:
        files: list[object] = [
            name for name in sorted(names) if (SHARED / name).exists()
        ]
        return [*files, *filter(psutil.pid_exists, pids), *folder.iterdir()]

    soon(lambda: not found())
    return found()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """For the job's temporary files alone."""
    path = tmp_path / "folder"
    path.mkdir()
    return path


def run(how: str, folder: Path, then: runner.Meanwhile | None = None) -> runner.Job:
    """Run the script, whose ranks go on once the monitor has warned."""
    warned = folder.with_name("warned")

    def meanwhile(launcher: int, said: Callable[[], tuple[str, str]]) -> None:
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
    if how == "kill, no time-out":
        assert "ChainerMN: rank 1 (process " in job.err, job
        assert " is gone" in job.err, job


def test_a_launcher_that_is_killed(folder):
    from mpi4py import MPI

    ours: list[psutil.Process] = []

    def kill_launcher(launcher, said):
        if not ours and said()[0].count("WAITING") == 2:
            ours.extend(psutil.Process(launcher).children(recursive=True))
            os.kill(launcher, signal.SIGKILL)

    job = run("launcher", folder, kill_launcher)
    assert ours, job
    # Its ranks, which sleep here, hadn't ended after 30 s.
    if MPI.get_vendor()[0] == "Open MPI":
        for one in ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        for left in folder.glob("ompi.*"):  # docs/failures.md tells of it
            shutil.rmtree(left)
    assert all(is_gone(one.pid) for one in ours)
    assert left_of(job, folder) == []


MAPPED = """
import mmap, sys
files = [open(name, "r+b") for name in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 0) for file in files]
print("MAPPED", flush=True)
sys.stdin.read()
"""


def test_what_others_use_or_own_is_not_removed(monkeypatch):
    def make(name):
        path = SHARED / f"{name}{os.getpid()}"
        path.write_bytes(b"x")
        return path

    def start(*files, group=None):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, "-c", MAPPED, *files]
        user = subprocess.Popen(
            command, preexec_fn=group and (lambda: os.setpgid(0, group())), **pipes
        )
        users.append(user)
        assert user.stdout.readline() == b"MAPPED\n"
        return user

    names = ("sem.mp-mine", "sem.mp-shared", "dataset", "psm_mine", "mpich_shm_unknown")
    mine, shared, *others = everything = [*map(make, names)]
    data, python, _ = others
    users: list[subprocess.Popen] = []
    try:
        rank = start(mine, shared, data, python, group=lambda: 0)
        # As one of the rank's that it left behind.
        worker = start(shared, group=lambda: rank.pid)
        files = SharedFiles()
        files.add((rank.pid, birth(rank.pid)))
        files.keep(0.0)
        assert not files.remove()  # the rank still lives
        assert mine.exists()
        rank.communicate(timeout=runner.SECONDS)
        assert not files.remove()  # its worker still lives
        assert [path.exists() for path in everything] == [False] + 4 * [True]
        worker.communicate(timeout=runner.SECONDS)
        with monkeypatch.context() as patched:
            patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
            again = SharedFiles()
            again._known = dict(files._known)
            assert again.remove()  # it is another user's
        assert shared.exists()
        # No descriptor is left to see who uses it.
        with monkeypatch.context() as patched:
            patched.setattr(cleanup, "_mapped", refuse)
            assert not files.remove()
        assert shared.exists()
        assert files.remove()
        assert [path.exists() for path in everything] == [
            False,
            False,
            True,
            True,
            True,
        ]
    finally:
        for user in users:
            user.kill()
            user.wait()
        for path in everything:
            path.unlink(missing_ok=True)


def refuse(_):
    raise OSError(24, "Too many open files")


# Open MPI's daemon is ended when a cut link has left it alone, and never before.

# It starts a rank, says its number, waits for its end, and then for a word that doesn't
# come. $0 is what Open MPI has in the daemon's command line.
DAEMON = """
sleep 1000 &
echo $!
wait
read word
"""
ONE_JOBS = "prterun-alpha-120@0"
Daemon = subprocess.Popen


@pytest.fixture
def start_daemon() -> Iterator[Callable[[str, str], tuple[Daemon, int]]]:
    """Starts a daemon of that name for those jobs; gives it, and its rank's number."""
    started: list[tuple[Daemon, int]] = []

    def start_daemon(name: str, jobs: str) -> tuple[Daemon, int]:
        daemon = subprocess.Popen(
            [name, "-c", DAEMON, jobs],
            executable="/bin/sh",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert daemon.stdout is not None
        rank = int(daemon.stdout.readline())
        started.append((daemon, rank))
        return daemon, rank

    yield start_daemon
    for daemon, _ in started:
        if daemon.poll() is None:
            for child in psutil.Process(daemon.pid).children():
                child.kill()
            daemon.kill()
        daemon.communicate()


def end_rank(daemon: Daemon, rank: int) -> None:
    os.kill(rank, signal.SIGKILL)
    assert soon(lambda: not psutil.Process(daemon.pid).children())


def test_it_is_ended_once_its_ranks_are(start_daemon, monkeypatch):
    monkeypatch.setattr(cleanup, "DAEMON_SECONDS", 0.1)
    daemon, rank = start_daemon("/usr/bin/prted", ONE_JOBS)
    cleanup.end_daemon(daemon.pid)
    assert is_running(daemon.pid)  # its rank lives
    end_rank(daemon, rank)
    cleanup.end_daemon(daemon.pid)
    assert is_gone(daemon.pid)


@pytest.mark.parametrize(
    ("name", "words"),
    [("/usr/bin/prted", "prte-alpha-120@0"), ("/usr/sbin/slurmstepd", ONE_JOBS)],
    ids=["many jobs'", "another launcher's"],
)
def test_a_launcher_of_a_site_is_left_alone(name, words, start_daemon, monkeypatch):
    monkeypatch.setattr(cleanup, "DAEMON_SECONDS", 0.1)
    daemon, rank = start_daemon(name, words)
    end_rank(daemon, rank)
    cleanup.end_daemon(daemon.pid)
    assert is_running(daemon.pid)

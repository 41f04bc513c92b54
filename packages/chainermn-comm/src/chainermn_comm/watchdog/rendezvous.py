"""Brings the ranks of a communicator together, and starts the monitor of each machine."""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..events import active_job
from . import recorder
from .network import addresses
from .processes import born
from .recorder import Record
from .status_region import EVERYBODY
from .timeout import Limit

if TYPE_CHECKING:
    from mpi4py import MPI

# The parent package imports NumPy, which the monitor has no need of; so it gets a bare one.
PROGRAM = """
import os, sys, types
sys.path.append(os.path.dirname(sys.argv[1]))
package = sys.modules["chainermn_comm"] = types.ModuleType("chainermn_comm")
package.__path__ = [sys.argv[1]]
from chainermn_comm.watchdog.monitor import main
main()
"""
# For an interpreter to start on a busy machine; the job goes on after that.
START_SECONDS = 20.0
_made = 0


def join(comm: MPI.Intracomm, world: int, limit: Limit) -> Record:
    """Have the calls on a communicator watched (collective over it).

    Ranks that no monitor knows yet get one for all of them that are on the same machine.

    Args:
        comm: the communicator.
        world: this process's rank in MPI.COMM_WORLD.
        limit: the same on all ranks.

    Returns:
        Where the calls are to be noted.
    """
    global _made
    if not limit.seconds or comm.size == 1:
        return Record()
    _made += 1
    mine, problem = _description(world)
    if problem is not None:
        _warn(problem)
    everyone = comm.allgather((world, _made, _machine(), mine))
    machines: dict[Any, list[dict[str, Any]]] = {}
    for *_, machine, it in everyone:
        if it is not None:
            machines.setdefault(machine, []).append(it)
    _watch(comm, machines, mine, limit)
    return Record() if problem else recorder.take(everyone[0][:2], comm.rank, comm.size)


def _watch(
    comm: MPI.Intracomm,
    machines: dict[Any, list[dict[str, Any]]],
    mine: dict[str, Any] | None,
    limit: Limit,
) -> None:
    """Start a monitor on each of these machines (collective)."""
    here = machines.get(_machine(), [])
    leads = mine is not None and here[0]["world"] == mine["world"]
    listener, where = _listen(here) if leads and len(machines) > 1 else (None, None)
    others = comm.allgather(where) if len(machines) > 1 else []
    if mine is not None:
        recorder.area().watched = True
    if leads:
        # The next one first: it is the one whose heart this machine's monitor listens to.
        in_turn = [*others[comm.rank + 1 :], *others[: comm.rank]]
        orders = {
            "ranks": here,
            # Not in the environment, by which `chainermn launch` finds what it has to kill.
            "launch": active_job(),
            "seconds": limit.seconds,
            "ends_job": limit.ends_job,
            "silence": limit.silence,
            "listener": listener and listener.fileno(),
            "mine": where,
            "others": [it for it in in_turn if it is not None],
        }
        _start(orders, listener)


@contextmanager
def meeting(operation: str, size: int = 1) -> Iterator[None]:
    """Have a call watched that belongs to no communicator, and that so many ranks take part in.

    What is called within is noted where it belongs. Nothing is watched before the first
    communicator is about to be made.
    """
    if recorder._area is None:
        yield
        return
    record = recorder.take(EVERYBODY, 0, size)
    record.collective(operation, 0)
    try:
        yield
    finally:
        record.release()


def _description(world: int) -> tuple[dict[str, Any] | None, Exception | None]:
    """What a monitor must know of this process; None if one knows it, or none can."""
    try:
        area = recorder.area()
    except OSError as problem:
        return None, problem
    if area.watched:
        return None, None
    return {
        "world": world,
        "pid": os.getpid(),
        "birth": born(os.getpid()),
        "area": area.file,
        "stacks": area.stacks,
        "life": area.life[0],
        "signal": area.signal,
    }, None


def _machine() -> tuple[str, str, int]:
    """What processes have in common that can see each other in /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return os.uname().nodename, boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return os.uname().nodename, "", 0


def _listen(
    here: list[dict[str, Any]],
) -> tuple[socket.socket | None, dict[str, Any] | None]:
    """A socket on which this machine's monitor can be asked, and where that is."""
    try:
        listener = socket.create_server(("", 0), backlog=128)
    except OSError as problem:
        _warn(problem)
        return None, None
    return listener, {
        "host": os.uname().nodename,
        "ranks": [it["world"] for it in here],
        "addresses": addresses(),
        "port": listener.getsockname()[1],
        "secret": secrets.token_hex(16),
    }


def _start(orders: dict[str, Any], listener: socket.socket | None) -> None:
    package = str(Path(__file__).resolve().parents[1])
    pids = [str(it["pid"]) for it in orders["ranks"]]  # for whoever looks at the processes
    kept = ("PATH", "LD_LIBRARY_PATH", "LANG")
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, package, *pids],
            stdin=subprocess.PIPE,  # other users can read a command line, not the secrets in it
            stdout=subprocess.DEVNULL,
            # Nobody else can open a socket; any other file the monitor opens when it must speak.
            stderr=None if stat.S_ISSOCK(os.fstat(2).st_mode) else subprocess.DEVNULL,
            close_fds=True,
            pass_fds=() if listener is None else (listener.fileno(),),
            cwd="/",
            env={name: os.environ[name] for name in kept if name in os.environ},
        )
        # It leaves a child of its own behind, which no `os.wait` of the script's will meet.
        process.communicate(json.dumps(orders).encode(), START_SECONDS)
    except (OSError, subprocess.SubprocessError) as problem:
        _warn(problem)
        return
    finally:
        if listener is not None:
            listener.close()
    if process.returncode:
        _warn(f"their monitor ended with status {process.returncode}")


def _warn(problem: object) -> None:
    # As an error it would leave the other ranks waiting.
    with suppress(RuntimeWarning):
        warnings.warn(
            f"calls that wait too long won't be reported: {problem}", RuntimeWarning, stacklevel=4
        )

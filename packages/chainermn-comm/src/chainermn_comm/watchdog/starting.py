"""Brings the ranks of a communicator together, and starts the monitor of each machine."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import calls
from .calls import Record
from .limit import Limit
from .processes import born
from .records import EVERYBODY

if TYPE_CHECKING:
    from mpi4py import MPI

# The parent package imports NumPy, which the monitor has no need of; so it gets a bare one.
PROGRAM = """
import sys, types
package = sys.modules["chainermn_comm"] = types.ModuleType("chainermn_comm")
package.__path__ = [sys.argv[1]]
from chainermn_comm.watchdog.monitor import main
main(sys.argv[2])
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
    everyone = comm.allgather((world, _made, _machine(), mine))
    if problem is not None:
        _warn(problem)
        return Record()
    record = calls.take(everyone[0][:2], comm.rank, comm.size)
    if mine is not None:
        here = [it for *_, machine, it in everyone if it is not None and machine == _machine()]
        calls.area().watched = True
        if mine["world"] == min(it["world"] for it in here):
            _start(here, limit)
    return record


@contextmanager
def meeting(operation: str) -> Iterator[None]:
    """Have a call watched that belongs to no communicator yet; not before the first one."""
    if calls._area is None:
        yield
        return
    record = calls.take(EVERYBODY, 0, 1)
    record.collective(operation, 0)
    try:
        yield
    finally:
        record.release()


def _description(world: int) -> tuple[dict[str, Any] | None, Exception | None]:
    """What a monitor must know of this process; None if one knows it, or none can."""
    try:
        area = calls.area()
    except (OSError, AttributeError) as problem:
        return None, problem
    if area.watched:
        return None, None
    return {
        "world": world,
        "pid": os.getpid(),
        "birth": born(os.getpid()),
        "area": area.file,
        "stacks": area.stacks,
        "signal": area.signal,
    }, None


def _machine() -> tuple[str, str, int]:
    """What processes have in common that can see each other in /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return os.uname().nodename, boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return os.uname().nodename, "", 0


def _start(ranks: list[dict[str, Any]], limit: Limit) -> None:
    orders = json.dumps({"ranks": ranks, "seconds": limit.seconds, "ends_job": limit.ends_job})
    package = str(Path(__file__).resolve().parents[1])
    kept = ("PATH", "LD_LIBRARY_PATH", "LANG")
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, package, orders],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Nobody else can open a socket; any other file the monitor opens when it must speak.
            stderr=None if stat.S_ISSOCK(os.fstat(2).st_mode) else subprocess.DEVNULL,
            close_fds=True,
            cwd="/",
            env={name: os.environ[name] for name in kept if name in os.environ},
        )
        # It leaves a child of its own behind, which no `os.wait` of the script's will meet.
        status = process.wait(START_SECONDS)
    except (OSError, subprocess.SubprocessError) as problem:
        _warn(problem)
        return
    if status:
        _warn(f"its monitor ended with status {status}")


def _warn(problem: object) -> None:
    warnings.warn(
        f"calls that wait too long won't be reported: {problem}", RuntimeWarning, stacklevel=4
    )

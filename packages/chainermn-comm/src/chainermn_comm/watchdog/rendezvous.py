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
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _chainermn_events import active_job

from . import recorder
from .network import addresses_towards, listen, own_addresses
from .processes import start_time
from .recorder import CallRecorder, StatusRegion
from .timeout import Timeout

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
_num_registered = 0


def register(comm: MPI.Intracomm, world: int, timeout: Timeout) -> CallRecorder:
    """Have the calls on a communicator watched, and return their recorder (collective over it).

    Ranks that no monitor knows yet get one for all of them that are on the same machine. The
    ``timeout`` is the same on all ranks, and ``world`` this process's rank in MPI.COMM_WORLD.
    """
    global _num_registered
    if not timeout.seconds or comm.size == 1:
        return CallRecorder()
    _num_registered += 1
    region = mine = None
    try:
        region = recorder.region()
    except OSError as problem:
        _warn(problem)
    if region is not None and not region.is_monitored:
        mine = _describe_process(world, region)
    everyone = comm.allgather((world, _num_registered, mine))
    machines: dict[Any, list[dict[str, Any]]] = {}  # the ranks that get a monitor now
    for *_, it in everyone:
        if it is not None:
            machines.setdefault(it["machine"], []).append(it)
    here = machines[mine["machine"]] if mine else []
    leads = mine is not None and here[0]["world"] == world
    listeners: list[socket.socket] = []
    others: list[dict[str, Any]] = []
    reached_at = None
    if len(machines) > 1:
        if leads:
            elsewhere = [ranks[0]["addresses"] for ranks in machines.values() if ranks is not here]
            listeners, reached_at = _listen(here, elsewhere)
        monitors = comm.allgather(reached_at)
        others = list(filter(None, monitors[comm.rank + 1 :] + monitors[: comm.rank]))
    if region is not None:
        region.is_monitored = True
    if leads:
        config = {
            "ranks": here,
            # Not in the environment, by which `chainermn launch` finds what it has to kill.
            "launch": active_job(),
            "timeout": asdict(timeout),
            "listeners": [listener.fileno() for listener in listeners],
            "secret": reached_at and reached_at["secret"],
            "others": others,  # the next one first
        }
        _launch_monitor(config, listeners)
    if region is None:
        return CallRecorder()
    return recorder.allocate(everyone[0][:2], comm.rank, comm.size)


def _describe_process(world: int, region: StatusRegion) -> dict[str, Any]:
    """Return what a monitor must know of this process."""
    return {
        "world": world,
        "machine": _machine_id(),
        "pid": os.getpid(),
        "start_time": start_time(os.getpid()),
        "region": region.file,
        "stacks": region.stacks,
        "liveness": region.liveness_pipe[0],
        "signal": region.signal,
        "addresses": own_addresses(),
    }


def _machine_id() -> tuple[str, str, int]:
    """Return what processes have in common that can see each other in /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return os.uname().nodename, boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return os.uname().nodename, "", 0


def _listen(
    here: list[dict[str, Any]], elsewhere: list[list[str]]
) -> tuple[list[socket.socket], dict[str, Any] | None]:
    """Return sockets on which this machine's monitor can be asked, and what peers must know."""
    try:
        listeners = listen(addresses_towards(here[0]["addresses"], elsewhere))
    except OSError as problem:
        _warn(problem)
        return [], None
    return listeners, {
        "host": os.uname().nodename,
        "ranks": [it["world"] for it in here],
        "endpoints": [listener.getsockname()[:2] for listener in listeners],
        "secret": secrets.token_hex(16),
    }


def _launch_monitor(config: dict[str, Any], listeners: list[socket.socket]) -> None:
    package = str(Path(__file__).resolve().parents[1])
    pids = [str(it["pid"]) for it in config["ranks"]]  # for whoever looks at the processes
    kept = ("PATH", "LD_LIBRARY_PATH", "LANG")
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, package, *pids],
            stdin=subprocess.PIPE,  # other users can read a command line, not the secrets in it
            stdout=subprocess.DEVNULL,
            # Nobody else can open a socket; any other file the monitor opens when it must print.
            stderr=None if stat.S_ISSOCK(os.fstat(2).st_mode) else subprocess.DEVNULL,
            pass_fds=config["listeners"],
            cwd="/",
            env={name: os.environ[name] for name in kept if name in os.environ},
        )
        # It leaves a child of its own behind, which no `os.wait` of the script's will reap.
        process.communicate(json.dumps(config).encode(), START_SECONDS)
    except (OSError, subprocess.SubprocessError) as problem:
        _warn(problem)
        return
    finally:
        for listener in listeners:
            listener.close()
    if process.returncode:
        _warn(f"their monitor ended with status {process.returncode}")


def _warn(problem: object) -> None:
    # As an error it would leave the other ranks waiting.
    with suppress(RuntimeWarning):
        warnings.warn(
            f"calls that wait too long won't be reported: {problem}", RuntimeWarning, stacklevel=4
        )

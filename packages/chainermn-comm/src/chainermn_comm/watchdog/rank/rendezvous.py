"""Brings the ranks of a communicator together, and starts the monitor of each machine.

Ranks describe themselves to the first one of their machine alone. Of these, the first
one gets to know the others' names, and they get to know where its monitor listens.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import stat
import struct
import subprocess
import sys
import warnings
from array import array
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _chainermn_events import active_job

from ..processes import stat as process_stat
from ..report import rank_list
from ..timeout import Timeout
from . import recorder
from .recorder import CallRecorder, StatusRegion

if TYPE_CHECKING:
    from mpi4py import MPI

# The parent package imports NumPy, which the monitor has no need of; so it gets a bare
# one.
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
# Monitors of all machines connect at about the same time.
BACKLOG = 4096
SIOCGIFADDR = 0x8915  # Linux's request for the address of an interface
_num_registered = 0


def register(comm: MPI.Intracomm, world: int, timeout: Timeout) -> CallRecorder | None:
    """Have the calls on a communicator watched, and return their recorder (collective over it).

    Ranks that no monitor knows yet get one for all of them that are on the same
    machine. The ``timeout`` is the same on all ranks, and ``world`` this process's rank
    in MPI.COMM_WORLD.
    """
    global _num_registered
    if comm.size == 1:
        return None
    from mpi4py import MPI

    _num_registered += 1
    region = None
    try:
        region = recorder.region()
    except OSError as problem:
        _warn(problem)
    is_new = region is not None and not region.is_monitored
    # Whether any rank is new, and rank 0's numbers, by which all call this
    # communicator.
    common = array(
        "q", (is_new, *((world, _num_registered) if comm.rank == 0 else (-1, -1)))
    )
    comm.Allreduce(MPI.IN_PLACE, common, MPI.MAX)
    if common[0]:
        _start_monitors(comm, world, region if is_new else None, timeout)
    if region is None:
        return None
    region.is_monitored = True
    return recorder.allocate((common[1], common[2]), comm.rank, comm.size)


def _start_monitors(
    comm: MPI.Intracomm, world: int, region: StatusRegion | None, timeout: Timeout
) -> None:
    """Start a monitor on each machine for its ranks that have a ``region`` here (collective)."""
    from mpi4py import MPI

    here = comm.Split_type(MPI.UNDEFINED if region is None else MPI.COMM_TYPE_SHARED)
    ranks = None
    if region is not None:
        # Containers may share memory, and not see each other's processes.
        near = here.Split(region.namespace % (1 << 31))
        ranks = near.gather(_describe_process(world, region))
        near.Free()
        here.Free()
    leaders = comm.Split(MPI.UNDEFINED if ranks is None else 0)
    if ranks is None:
        return
    name = f"{rank_list([rank['world'] for rank in ranks])} on {os.uname().nodename}"
    listener, star = _join_star(leaders, name)
    leaders.Free()
    config = {
        "ranks": ranks,
        # Not in the environment, by which `chainermn launch` finds what it has to kill.
        "launch": active_job(),
        "timeout": asdict(timeout),
        "listener": listener and listener.fileno(),
        "star": star,
    }
    _launch_monitor(config)
    if listener is not None:
        listener.close()


def _join_star(
    leaders: MPI.Comm, name: str
) -> tuple[socket.socket | None, dict[str, Any]]:
    """Return where the hub listens, on the hub alone, and this machine's place (collective)."""
    names = leaders.gather(name)
    own = own_addresses()
    listener = hub = None
    if names is not None:
        if len(names) > 1:
            try:
                listener = socket.create_server(("", 0), backlog=BACKLOG)
            except OSError as problem:
                _warn(problem)
        endpoints = (
            [(one, listener.getsockname()[1]) for one in own] if listener else []
        )
        hub = {"names": [name], "secret": secrets.token_hex(16), "endpoints": endpoints}
    place = {"number": leaders.rank, **leaders.bcast(hub)}
    # An address that both have is a bridge's, unless they share all (containers of a
    # machine).
    far = [endpoint for endpoint in place["endpoints"] if endpoint[0] not in own]
    place["endpoints"] = far or place["endpoints"]
    return listener, place if names is None else {**place, "names": names}


def own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses, but for the loopback's."""
    found = []
    # It fails where no file is left.
    with suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    return [
        address for address in dict.fromkeys(found) if not address.startswith("127.")
    ]


def _describe_process(world: int, region: StatusRegion) -> dict[str, Any]:
    """Return what a monitor must know of this process."""
    return {
        "world": world,
        "pid": os.getpid(),
        "start_time": process_stat(os.getpid()).start,
        "region": region.file,
        "stacks": region.stacks,
        "liveness": region.liveness_pipe[0],
        "signal": region.signal,
    }


def _launch_monitor(config: dict[str, Any]) -> None:
    package = str(Path(__file__).resolve().parents[2])
    # For people who look at the processes.
    pids = [str(it["pid"]) for it in config["ranks"]]
    kept = ("PATH", "LD_LIBRARY_PATH", "LANG")
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", PROGRAM, package, *pids],
            # Other users can read a command line, not the secrets in it.
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Nobody else can open a socket; any other file the monitor opens when it
            # must print.
            stderr=None if stat.S_ISSOCK(os.fstat(2).st_mode) else subprocess.DEVNULL,
            pass_fds=[] if config["listener"] is None else [config["listener"]],
            cwd="/",
            env={name: os.environ[name] for name in kept if name in os.environ},
        )
        # It leaves a child of its own behind, which no `os.wait` of the script's will
        # reap.
        process.communicate(json.dumps(config).encode(), START_SECONDS)
    except (OSError, subprocess.SubprocessError) as problem:
        _warn(problem)
    else:
        if process.returncode:
            _warn(f"their monitor ended with status {process.returncode}")


def _warn(problem: object) -> None:
    # As an error it would leave the other ranks waiting.
    with suppress(RuntimeWarning):
        warnings.warn(
            f"calls that wait too long won't be reported: {problem}",
            RuntimeWarning,
            stacklevel=4,
        )

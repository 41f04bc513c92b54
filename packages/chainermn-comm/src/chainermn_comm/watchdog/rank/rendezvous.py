"""Brings the ranks of a communicator together, and starts the monitor of each machine.

Ranks describe themselves to the first one of their machine alone. Of these, the first one's gets to
know the others' names and addresses, and they get to know where its monitor listens.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import warnings
from array import array
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _chainermn_events import active_job

from ...timeout import Timeout
from ..processes import start_time
from . import recorder
from .addresses import addresses_towards, listen, own_addresses
from .recorder import CallRecorder, StatusRegion

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
# Of a machine, that its name gives.
MOST_RANKS = 8
# For an interpreter to start on a busy machine; the job goes on after that.
START_SECONDS = 20.0
_num_registered = 0


def register(comm: MPI.Intracomm, world: int, timeout: Timeout) -> CallRecorder | None:
    """Have the calls on a communicator watched, and return their recorder (collective over it).

    Ranks that no monitor knows yet get one for all of them that are on the same machine. The
    ``timeout`` is the same on all ranks, and ``world`` this process's rank in MPI.COMM_WORLD.
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
    # Whether any rank is new, and rank 0's numbers, by which all call this communicator.
    common = array("q", (is_new, *((world, _num_registered) if comm.rank == 0 else (-1, -1))))
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

    description = None if region is None else _describe_process(world, region)
    machine = _split_by_machine(comm, is_member=description is not None)
    ranks = None
    if machine != MPI.COMM_NULL:
        ranks = machine.gather(description)
        machine.Free()
    leaders = comm.Split(MPI.UNDEFINED if ranks is None else 0)
    if ranks is None:
        return
    listeners, star = _join_star(leaders, [rank["world"] for rank in ranks])
    leaders.Free()
    config = {
        "ranks": ranks,
        # Not in the environment, by which `chainermn launch` finds what it has to kill.
        "launch": active_job(),
        "timeout": asdict(timeout),
        "listeners": [listener.fileno() for listener in listeners],
        "star": star,
    }
    _launch_monitor(config, listeners)


def _split_by_machine(comm: MPI.Intracomm, is_member: bool) -> MPI.Comm:
    """Return a communicator of the members on this machine, or MPI.COMM_NULL (collective)."""
    from mpi4py import MPI

    machine = hashlib.blake2b(repr(_machine_id()).encode(), digest_size=16).digest()
    color = int.from_bytes(machine[:4], "big") >> 1  # a C int
    alike = comm.Split(color if is_member else MPI.UNDEFINED)
    if alike == MPI.COMM_NULL:
        return alike
    # Several machines may have the same color.
    part = alike.Split(alike.allgather(machine).index(machine))
    alike.Free()
    return part


def _join_star(leaders: MPI.Comm, ranks: list[int]) -> tuple[list[socket.socket], dict[str, Any]]:
    """Return sockets on which the hub listens, and this machine's place (collective).

    ``leaders`` are a rank of each machine, and ``ranks`` those of this one, in MPI.COMM_WORLD.
    """
    name = _machine_name(os.uname().nodename, ranks)
    own = own_addresses()
    machines = leaders.gather((name, own))
    listeners: list[socket.socket] = []
    hub = None
    if machines is not None:
        if others := [addresses for _, addresses in machines[1:]]:
            listeners = _listen(own, others)
        endpoints = [listener.getsockname()[:2] for listener in listeners]
        secret = secrets.token_hex(16)
        hub = {"hub": name, "addresses": own, "endpoints": endpoints, "secret": secret}
    star = {"number": leaders.rank, **leaders.bcast(hub)}
    # One that both have is a bridge's, which each machine has by itself.
    theirs = [addresses for _, addresses in machines or ()] or [star["addresses"]]
    theirs = [[one for one in addresses if one not in own] for addresses in theirs]
    if machines is None:
        return listeners, {**star, "addresses": theirs[0]}
    return listeners, {**star, "addresses": theirs, "names": [name for name, _ in machines]}


def _machine_name(host: str, ranks: list[int]) -> str:
    """Return how reports call a machine."""
    first = ", ".join(map(str, ranks[:MOST_RANKS])) + ", ..." * (len(ranks) > MOST_RANKS)
    return f"rank{'s' * (len(ranks) > 1)} {first} on {host}"


def _describe_process(world: int, region: StatusRegion) -> dict[str, Any]:
    """Return what a monitor must know of this process."""
    return {
        "world": world,
        "pid": os.getpid(),
        "start_time": start_time(os.getpid()),
        "region": region.file,
        "stacks": region.stacks,
        "liveness": region.liveness_pipe[0],
        "signal": region.signal,
    }


def _machine_id() -> tuple[str, str, int]:
    """Return what processes have in common that can see each other in /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return os.uname().nodename, boot, os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return os.uname().nodename, "", 0


def _listen(own: list[str], elsewhere: list[list[str]]) -> list[socket.socket]:
    """Return sockets that the other hosts can reach; none, and a warning, where there can't be."""
    try:
        return listen(addresses_towards(own, elsewhere))
    except OSError as problem:
        _warn(problem)
        return []


def _launch_monitor(config: dict[str, Any], listeners: list[socket.socket]) -> None:
    package = str(Path(__file__).resolve().parents[2])
    pids = [str(it["pid"]) for it in config["ranks"]]  # for people who look at the processes
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

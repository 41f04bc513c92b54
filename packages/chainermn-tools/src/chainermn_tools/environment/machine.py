"""The machine: its name, and the cores and the memory that this process may use."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _chainermn_cgroups import folders as cgroup_folders
from chainermn_tools.environment.probe import MARGIN_SECONDS, run_concurrently
from chainermn_tools.jobs import available_cores

# Version 1 of cgroups says "unlimited" by a number near 2^63.
UNLIMITED = 1 << 60


def machine(seconds: float) -> dict[str, Any]:
    """Name, system, cores and memory; each on its own."""
    probes = {
        "host": socket.gethostname,
        "kernel": lambda: f"{platform.system()} {platform.release()}",
        "architecture": platform.machine,
        "processor": processor,
        "libc": lambda: " ".join(platform.libc_ver()),
        "cores": available_cores,
        "memory": memory,
        "/dev/shm": shared_memory,
        "limits": limits,
        "ptrace scope": ptrace_scope,
        "interfaces": interfaces,
    }
    return run_concurrently(probes, seconds + MARGIN_SECONDS)


def memory() -> dict[str, Any]:
    """Memory of the machine and the limit of this process's cgroup (None without one)."""
    table = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {name: int(table[name].split()[0]) for name in ("MemTotal", "MemAvailable")}
    return {
        "total_bytes": kib["MemTotal"] * 1024,
        "available_bytes": kib["MemAvailable"] * 1024,
        "cgroup_bytes": _least(_memory_limit(folder) for folder in cgroup_folders("memory")),
    }


def shared_memory() -> dict[str, int]:
    """Size of the file system that holds the ranks' shared windows."""
    found = os.statvfs("/dev/shm")
    return {
        "total_bytes": found.f_frsize * found.f_blocks,
        "free_bytes": found.f_frsize * found.f_bavail,
    }


def processor() -> str | None:
    """The model of the CPU, as Linux names it; None where it doesn't."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return None


def limits() -> dict[str, int | None]:
    """What this process may have; None for no limit. InfiniBand needs much locked memory."""
    kinds = {
        "locked_bytes": resource.RLIMIT_MEMLOCK,
        "stack_bytes": resource.RLIMIT_STACK,
        "open files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
    }
    soft = {name: resource.getrlimit(kind)[0] for name, kind in kinds.items()}
    return {name: None if one == resource.RLIM_INFINITY else one for name, one in soft.items()}


def ptrace_scope() -> int | None:
    """Yama's setting; from 1 on a rank may not read another's memory. None without Yama."""
    text = _read(Path("/proc/sys/kernel/yama/ptrace_scope"))
    return None if text is None else int(text)


def interfaces() -> list[str]:
    """The names of the network interfaces, for NCCL_SOCKET_IFNAME and its like."""
    return [name for _, name in socket.if_nameindex()]


def _memory_limit(folder: Path) -> int | None:
    """A cgroup's limit in bytes; None where it has none."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(folder / name)
        if text is not None and text != "max" and int(text) < UNLIMITED:
            return int(text)
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _least(values: Iterator[Any]) -> Any:
    return min((value for value in values if value is not None), default=None)

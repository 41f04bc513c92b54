"""The machine: its name, the cores and the memory that this process may use, and its GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from importlib import util
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from _chainermn_limits import cgroup_folders
from chainermn_tools import jobs
from chainermn_tools.environment import probe

# Version 1 of cgroups says "unlimited" by a number near 2^63.
UNLIMITED = 1 << 60
GPU_FIELDS = ("driver_version", "name", "memory.total")


def machine(timeout: float) -> dict[str, Any]:
    """Return the name, the system, the cores and the memory, each by a probe of its own."""
    probes = {
        "host": socket.gethostname,
        "system": platform.platform,
        "processor": processor,
        "cores": jobs.available_cores,
        "memory": memory,
        "shared_memory": shared_memory,
        # For NCCL_SOCKET_IFNAME and similar variables.
        "interfaces": lambda: [name for _, name in socket.if_nameindex()],
    }
    return probe.run_concurrently(probes, probe.MARGIN * timeout)


def memory() -> dict[str, Any]:
    """Return the machine's memory, and the limit of this process's cgroup (None without one)."""
    found = psutil.virtual_memory()
    limits = [_memory_limit(folder) for folder in cgroup_folders("memory")]
    return {
        "total_bytes": found.total,
        "available_bytes": found.available,
        "cgroup_bytes": min((one for one in limits if one is not None), default=None),
    }


def shared_memory() -> dict[str, int]:
    """Return the size of /dev/shm, which holds the ranks' shared windows."""
    fs = os.statvfs("/dev/shm")
    return {
        "total_bytes": fs.f_frsize * fs.f_blocks,
        "free_bytes": fs.f_frsize * fs.f_bavail,
    }


def processor() -> str | None:
    """Return the model of the CPU as Linux names it; None if Linux doesn't."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return None


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # there is no limit, or it is "max"
            limit = int((folder / name).read_text())
            if limit < UNLIMITED:
                return limit
    return None


def gpus(timeout: float) -> dict[str, Any]:
    """Return what the driver, CuPy and NCCL say of the GPUs, each by a probe with this time-out."""
    probes: dict[str, Callable[[], Any]] = {
        "driver": lambda: gpu_driver(timeout),
        "cupy": lambda: call_with_cupy(gpu_devices, timeout),
        "nccl": lambda: call_with_cupy(nccl_version, timeout),
    }
    return probe.run_concurrently(probes, probe.MARGIN * timeout)


def gpu_driver(timeout: float) -> list[str]:
    """Return a line for each GPU (driver, name, memory); raise Unavailable without a driver."""
    path = shutil.which("nvidia-smi")
    if path is None:
        raise jobs.Unavailable("no nvidia-smi on PATH")
    query = [path, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader"]
    return jobs.check_output(query, timeout).strip().splitlines()


def call_with_cupy(
    function: Callable[[], probe.Answer], timeout: float
) -> probe.Answer:
    """Call a function that imports CuPy in a subprocess; raise Unavailable if the call fails."""
    if util.find_spec("cupy") is None:
        raise jobs.Unavailable("CuPy is not installed")
    return probe.call_in_subprocess(function, timeout)


def gpu_devices() -> dict[str, Any]:
    """Return CUDA's versions and devices. Call it in a subprocess."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = [
        runtime.getDeviceProperties(n) for n in range(runtime.getDeviceCount())
    ]
    return {
        "cuda": _dotted(runtime.runtimeGetVersion()),
        "devices": [
            {
                "name": one["name"].decode(),
                "memory_bytes": one["totalGlobalMem"],
                "compute_capability": f"{one['major']}.{one['minor']}",
            }
            for one in properties
        ],
    }


def nccl_version() -> str:
    """Return NCCL's version, or "absent". Call it in a subprocess."""
    from cupy.cuda import nccl

    # Without the library CuPy imports a stub in its place.
    if not nccl.available:
        return "absent"
    code = nccl.get_version()
    # 22203 is 2.22.3, but until version 2.8 NCCL wrote 2708 for 2.7.8.
    major = 10000 if code > 10000 else 1000
    return f"{code // major}.{code % major // 100}.{code % 100}"


def _dotted(code: int) -> str:
    """Return CUDA's version as text: 12040 is 12.4."""
    return f"{code // 1000}.{code % 1000 // 10}"

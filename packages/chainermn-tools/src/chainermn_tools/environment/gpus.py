"""The GPUs, as their driver and as CuPy see them."""

from __future__ import annotations

import shutil
from importlib import util
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.environment import probe

FIELDS = ("driver_version", "name", "memory.total")


def gpus(seconds: float) -> dict[str, Any]:
    """What the driver says, what CuPy says, and NCCL; each on its own."""
    return probe.run_concurrently(
        {
            "driver": lambda: driver(seconds),
            "cupy": lambda: with_cupy(devices, seconds),
            "nccl": lambda: with_cupy(nccl, seconds),
        },
        seconds + probe.MARGIN_SECONDS,
    )


def driver(seconds: float) -> list[str]:
    """A line for each GPU: driver, name, memory.

    Raises:
        Unavailable: NVIDIA's driver is not installed, or does not answer.
    """
    path = shutil.which("nvidia-smi")
    if path is None:
        raise jobs.Unavailable("no nvidia-smi on PATH")
    query = [path, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"]
    return jobs.check_output(query, seconds).strip().splitlines()


def with_cupy(function: Any, seconds: float) -> Any:
    """Ask a child process that imports CuPy.

    Raises:
        Unavailable: CuPy is not installed, or the child failed.
    """
    if util.find_spec("cupy") is None:
        raise jobs.Unavailable("CuPy is not installed")
    return probe.call_in_subprocess(function, seconds)


def devices() -> dict[str, Any]:
    """CUDA's versions and devices. Call it in a child process."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = [runtime.getDeviceProperties(n) for n in range(runtime.getDeviceCount())]
    return {
        "driver's cuda": _dotted(runtime.driverGetVersion()),
        "cuda": _dotted(runtime.runtimeGetVersion()),
        "devices": [
            {
                "name": one["name"].decode(),
                "memory_bytes": one["totalGlobalMem"],
                "compute capability": f"{one['major']}.{one['minor']}",
            }
            for one in properties
        ],
    }


def nccl() -> str:
    """NCCL's version, or that it is absent. Call it in a child process."""
    from cupy.cuda import nccl

    # Without the library CuPy imports a stub in its place.
    if not nccl.available:
        return "absent"
    code = nccl.get_version()
    # 22203 is 2.22.3, but up to 2.8 NCCL wrote 2708 for 2.7.8.
    major = 10000 if code > 10000 else 1000
    return f"{code // major}.{code % major // 100}.{code % 100}"


def _dotted(code: int) -> str:
    """CUDA's 12040 is 12.4."""
    return f"{code // 1000}.{code % 1000 // 10}"

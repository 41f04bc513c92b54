"""Checks of GPUs: driver, CuPy, NCCL, and how many of them the ranks see."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from chainermn_tools import environment
from chainermn_tools.doctor.check import (
    CheckResult,
    Checks,
    Context,
    failed,
    ok,
    skipped,
    warning,
)
from chainermn_tools.doctor.hints import hint_for
from chainermn_tools.formatting import format_count

NO_GPU = "no NVIDIA GPU here"
VISIBLE = "CUDA_VISIBLE_DEVICES"
PIP = f"{sys.executable} -m pip install"
INSTALL_CUPY = f"{PIP} 'cupy-cuda13x[ctk]'   # cupy-cuda12x for drivers before 580"
INSTALL_NCCL = f"{PIP} -U nvidia-nccl-cu13   # -cu12 beside cupy-cuda12x"
NCCL_SECONDS_SHARE = 0.3

checks = Checks()


def device_files() -> list[str]:
    """Return the names under which the driver shows GPUs in the file system."""
    return [path.name for path in Path("/dev").glob("nvidia[0-9]*")]


def _driver_lines(context: Context) -> list[str]:
    """Return nvidia-smi's line for each GPU; none if the program is missing, fails or sees none."""
    found = context.facts["gpus"]["driver"]
    if isinstance(found, dict):
        return []
    return [line for line in found if line.count(",") >= 2]


def _cupy_version(context: Context) -> str | None:
    for name, version in context.facts["packages"].items():
        if name.startswith("cupy") and version:
            return str(version)
    return None


@checks.add("gpus", "Are there GPUs, and does their driver answer?")
def driver(context: Context) -> CheckResult:
    lines = _driver_lines(context)
    if lines:
        return ok(f"{len(lines)}: {'; '.join(lines)}", gpus=lines)
    files = device_files()
    if not files:
        return skipped(NO_GPU)
    found = context.facts["gpus"]["driver"]
    problem = found["unavailable"] if isinstance(found, dict) else " ".join(found)
    if "nvidia-smi on PATH" in problem:
        count = format_count(len(files), "GPU")
        return ok(f"{count}; without nvidia-smi on PATH their names are unknown")
    hint = "install this kernel's driver again, or restart; nvidia-smi must work"
    return failed(problem, hint_for(problem, hint))


@checks.add("cupy", "Can CuPy use a GPU for each rank?", ("packages", "gpus"))
def cupy(context: Context) -> CheckResult:
    if not device_files() and not _driver_lines(context):
        return skipped(NO_GPU)
    version = _cupy_version(context)
    if version is None:
        return warning("CuPy is missing, so ranks compute on CPUs", INSTALL_CUPY)
    if os.environ.get(VISIBLE, "0").strip() in ("", "-1"):
        return warning(f"{VISIBLE} hides the GPUs", f"unset {VISIBLE}")
    found = context.facts["gpus"]["cupy"]
    if problem := found.get("unavailable"):
        hint = "see more: python -c 'import cupy; cupy.show_config()'"
        return failed(problem, hint_for(problem, hint))
    count = len(found["devices"])
    message = f"CuPy {version} sees {format_count(count, 'GPU')}"
    ranks = context.local_ranks() or 1
    if ranks > count:
        message += f", for {format_count(ranks, 'rank')}"
        hint = f'nvidia-smi -L; echo "[${VISIBLE}]"   # or start at most {count} ranks here'
        return failed(message, hint)
    return ok(message)


@checks.add("nccl", "Is NCCL installed, and new enough?", needs=("cupy",))
def nccl(context: Context) -> CheckResult:
    if not context.facts["gpus"]["cupy"].get("devices"):
        return skipped("CuPy sees no GPU")
    found = context.facts["gpus"]["nccl"]
    if isinstance(found, dict):
        problem = found["unavailable"]
        return failed(problem, hint_for(problem, INSTALL_NCCL))
    if found == "absent":
        message = "NCCL is not installed: only naive and flat then take arrays on GPUs"
        return warning(message, INSTALL_NCCL)
    timeout = context.share(NCCL_SECONDS_SHARE)
    oldest = environment.call_in_subprocess(oldest_nccl, timeout)
    version = [int(part) for part in found.split(".")]
    if version[:2] < oldest:
        wanted = ".".join(map(str, oldest))
        return failed(f"{found} is too old; {wanted} or newer is needed", INSTALL_NCCL)
    return ok(f"NCCL {found}")


def oldest_nccl() -> list[int]:
    """Return the oldest version of NCCL that suffices. Call it in a subprocess."""
    import mpi4py

    # So this function has an answer even if MPI can't start.
    mpi4py.rc.initialize = False
    from chainermn_comm.gpu import OLDEST_NCCL

    return list(OLDEST_NCCL)

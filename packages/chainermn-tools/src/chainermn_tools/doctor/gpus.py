"""Checks of GPUs: driver, CuPy, NCCL, and how many of them the ranks see."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

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

DRIVER_FOLDERS = (Path("/dev"), Path("/proc/driver/nvidia/gpus"))
# The first driver of CUDA 13.
CUDA_13_DRIVER = 580
NO_GPU = "no NVIDIA GPU here"
NO_CUPY = "CuPy is not installed"
VISIBLE = "CUDA_VISIBLE_DEVICES"
NCCL_SECONDS_SHARE = 0.3

checks = Checks()


def device_files() -> list[str]:
    """Return the names under which the driver shows GPUs in the file system."""
    devices, folder = DRIVER_FOLDERS
    files = [path.name for path in devices.glob("nvidia[0-9]*")]
    if not files and folder.is_dir():
        files = [path.name for path in folder.iterdir()]
    return files


def _driver_lines(context: Context) -> list[str]:
    """Return nvidia-smi's line for each GPU; none if it is missing, fails or sees none."""
    found = context.facts["gpus"]["driver"]
    if isinstance(found, dict):
        return []
    return [line for line in found if line.count(",") >= 2]


def _cupy_version(context: Context) -> str | None:
    for name, version in context.facts["packages"].items():
        if name.startswith("cupy") and version:
            return str(version)
    return None


def _not_applicable(context: Context) -> CheckResult | None:
    if not device_files() and not _driver_lines(context):
        return skipped(NO_GPU)
    if _cupy_version(context) is None:
        return skipped(NO_CUPY)
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
        return ok(f"{len(files)} GPUs; {problem}, which only shows them")
    hint = "install this kernel's driver again, or restart; nvidia-smi must work"
    return failed(problem, hint_for(problem, hint))


@checks.add("cupy", "Can CuPy use the GPUs?", needs=("packages", "gpus"))
def cupy(context: Context) -> CheckResult:
    skip = _not_applicable(context)
    if skip is not None:
        if skip.message == NO_CUPY:
            return warning(
                f"{NO_CUPY}, so ranks compute on CPUs", _install(context, "cupy")
            )
        return skip
    if os.environ.get(VISIBLE, "0").strip() in ("", "-1"):
        return warning(f"{VISIBLE} hides the GPUs", f"unset {VISIBLE}")
    found = context.facts["gpus"]["cupy"]
    if problem := found.get("unavailable"):
        hint = "see more: python -c 'import cupy; cupy.show_config()'"
        return failed(problem, hint_for(problem, hint))
    version = _cupy_version(context)
    if not found["devices"]:
        hint = f'echo "[${VISIBLE}]"; nvidia-smi -L'
        return failed(f"CuPy {version} sees no GPU", hint)
    count = format_count(len(found["devices"]), "GPU")
    return ok(f"CuPy {version} on CUDA {found['cuda']} sees {count}")


@checks.add("nccl", "Is NCCL installed, and new enough?", needs=("cupy",))
def nccl(context: Context) -> CheckResult:
    skip = _not_applicable(context)
    if skip is not None:
        return skip
    found = context.facts["gpus"]["nccl"]
    install = _install(context, "nccl")
    if isinstance(found, dict):
        return failed(found["unavailable"], hint_for(found["unavailable"], install))
    if found == "absent":
        message = "absent: with several ranks only flat and naive take arrays on GPUs"
        return warning(message, install)
    timeout = context.share(NCCL_SECONDS_SHARE)
    oldest = environment.call_in_subprocess(oldest_nccl, timeout)
    version = [int(part) for part in found.split(".")]
    if version[:2] < oldest:
        wanted = ".".join(map(str, oldest))
        return failed(f"{found} is too old; {wanted} or newer is needed", install)
    return ok(found)


@checks.add(
    "visible_gpus",
    "Does CUDA_VISIBLE_DEVICES leave a GPU for each rank?",
    needs=("cupy",),
)
def visible_gpus(context: Context) -> CheckResult:
    skip = _not_applicable(context)
    if skip is not None:
        return skip
    devices = context.facts["gpus"]["cupy"].get("devices")
    if devices is None:
        return skipped(f"{VISIBLE} hides the GPUs")
    count = len(devices)
    setting = os.environ.get(VISIBLE)
    message = f"{count} visible"
    if setting is not None:
        message += f"; {VISIBLE} is {setting!r}"
        named = [part for part in setting.split(",") if part.strip()]
        if len(named) > count:
            # CUDA takes the entries before the first one that it doesn't know.
            message += f", whose entry {named[count]!r} is no GPU"
            return failed(message, f"unset {VISIBLE}")
    ranks = context.local_ranks() or 1
    if ranks > count:
        message += f", for {ranks} ranks; NCCL refuses two ranks on one GPU"
        return failed(message, f"start at most {count} ranks here, or unset {VISIBLE}")
    return ok(message)


def oldest_nccl() -> list[int]:
    """Return the oldest version of NCCL that will do. Call it in a subprocess."""
    import mpi4py

    mpi4py.rc.initialize = False  # where MPI can't start, this still has an answer
    from chainermn_comm.gpu import OLDEST_NCCL

    return list(OLDEST_NCCL)


def _install(context: Context, what: str) -> str:
    """Return how to get CuPy or NCCL for the CUDA that the driver, or CuPy, is for."""
    cuda = 13
    for line in _driver_lines(context):
        version = line.split(".")[0]
        if version.isdigit() and int(version) < CUDA_13_DRIVER:
            cuda = 12
    packages: dict[str, Any] = context.facts["packages"]
    if packages.get("cupy-cuda12x"):
        cuda = 12
    name = f"-U nvidia-nccl-cu{cuda}"
    if what == "cupy":
        name = f"'cupy-cuda{cuda}x[ctk]'"
    return f"{sys.executable} -m pip install {name}"

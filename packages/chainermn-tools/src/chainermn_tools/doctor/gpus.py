"""Checks of GPUs: driver, CuPy, NCCL, and how many of them the ranks see."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
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
from chainermn_tools.doctor.hints import hint_for_error
from chainermn_tools.doctor.software import installed_versions
from chainermn_tools.formatting import format_count
from chainermn_tools.jobs import Unavailable

DRIVER_FOLDERS = (Path("/dev"), Path("/proc/driver/nvidia/gpus"))
# The first drivers of CUDA 13 and of CUDA 12.
CUDA_OF_DRIVER = ((580, 13), (525, 12))
NO_GPU = "no NVIDIA GPU here"
VISIBLE = "CUDA_VISIBLE_DEVICES"

checks = Checks()


@Context.cached
def driver_lines(context: Context) -> list[str]:
    """Return a line for each GPU; raise Unavailable if nvidia-smi is missing or fails."""
    return environment.gpu_driver(context.program_timeout())


@Context.cached
def cupy_devices(context: Context) -> dict[str, Any]:
    """Return CUDA's versions and the visible devices; raise Unavailable without CuPy or driver."""
    return environment.call_with_cupy(
        environment.gpu_devices, context.program_timeout()
    )


@checks.add("gpus", "Are there GPUs, and does their driver answer?")
def driver(context: Context) -> CheckResult:
    files = device_files()
    try:
        lines = driver_lines(context)
    except Unavailable as error:
        is_missing = "nvidia-smi on PATH" in str(error)
        if not files:
            return skipped(NO_GPU if is_missing else f"{NO_GPU} ({error})")
        if is_missing:
            return ok(f"{len(files)} GPUs; {error}, which only shows them")
        hint = (
            "install the driver of this kernel again, or restart the machine; "
            "nvidia-smi must work"
        )
        return failed(str(error), hint_for_error(error, hint))
    if not lines or any(line.count(",") < 2 for line in lines):
        return skipped(f"{NO_GPU}; nvidia-smi says: {' '.join(lines) or 'nothing'}")
    return ok(f"{len(lines)}: {'; '.join(lines)}", gpus=lines)


@checks.add("cupy", "Can CuPy use the GPUs?", needs=("packages", "gpus"))
def cupy(context: Context) -> CheckResult:
    version = _cupy_version(context)
    if not has_gpu(context):
        return skipped(
            f"{NO_GPU}; {f'CuPy {version}' if version else 'nor is CuPy installed'}"
        )
    if version is None:
        message = "CuPy is not installed, so ranks compute on CPUs"
        return warning(message, _install_command(context, "cupy"))
    setting = os.environ.get(VISIBLE)
    if setting is not None and setting.strip() in ("", "-1"):
        return warning(
            f"{VISIBLE} is {setting!r} and hides the GPUs", f"unset {VISIBLE}"
        )
    try:
        found = cupy_devices(context)
    except Unavailable as error:
        hint = "see more: python -c 'import cupy; cupy.show_config()'"
        return failed(str(error), hint_for_error(error, hint))
    devices = found["devices"]
    if not devices:
        return failed(
            f"CuPy {version} sees no GPU", f'echo "[${VISIBLE}]"; nvidia-smi -L'
        )
    count = format_count(len(devices), "GPU")
    return ok(f"CuPy {version} on CUDA {found['cuda']} sees {count}", devices=devices)


@checks.add("nccl", "Is NCCL installed, and new enough?", needs=("cupy",))
def nccl(context: Context) -> CheckResult:
    if not has_gpu(context):
        return skipped(NO_GPU)
    if _cupy_version(context) is None:
        return skipped("CuPy is not installed")
    found = environment.call_with_cupy(
        environment.nccl_version, context.program_timeout()
    )
    install = _install_command(context, "nccl")
    if found == "absent":
        message = "absent: with several ranks only flat and naive take arrays on GPUs"
        return warning(message, install)
    oldest = environment.call_in_subprocess(oldest_nccl, context.program_timeout())
    version = tuple(map(int, found.split(".")))
    if version[:2] < tuple(oldest):
        message = f"{found} is too old; {'.'.join(map(str, oldest))} is the oldest that will do"
        return failed(message, install)
    return ok(found, version=found)


@checks.add(
    "visible_gpus",
    "Does CUDA_VISIBLE_DEVICES leave a GPU for each rank?",
    needs=("cupy",),
)
def visible_gpus(context: Context) -> CheckResult:
    if not has_gpu(context):
        return skipped(NO_GPU)
    if _cupy_version(context) is None:
        return skipped("CuPy is not installed")
    setting, ranks = os.environ.get(VISIBLE), context.local_ranks()
    try:
        count = len(cupy_devices(context)["devices"])
    except Unavailable:
        return skipped(f"{VISIBLE} hides the GPUs, which 'cupy' says")
    message = f"{count} visible; {VISIBLE} is " + (
        "not set" if setting is None else repr(setting)
    )
    named = [part for part in (setting or "").split(",") if part.strip()]
    if setting is not None and len(named) > count:
        # CUDA takes the entries before the first one that it doesn't know.
        return failed(
            f"{message}, whose entry {named[count]!r} is no GPU", f"unset {VISIBLE}"
        )
    if ranks is not None and ranks > count:
        hint = f"start at most {count} ranks here"
        hint += f", or unset {VISIBLE}" if setting is not None else ""
        return failed(
            f"{message}, for {ranks} ranks; NCCL refuses two ranks on one GPU", hint
        )
    return ok(message)


def oldest_nccl() -> list[int]:
    """Return the oldest version of NCCL that will do. Call it in a subprocess."""
    import mpi4py

    mpi4py.rc.initialize = False  # where MPI can't start, this still has an answer
    from chainermn_comm.gpu import OLDEST_NCCL

    return list(OLDEST_NCCL)


def device_files() -> list[str]:
    """Return the names under which the driver shows GPUs in the file system."""
    devices, folder = DRIVER_FOLDERS
    files = [path.name for path in devices.glob("nvidia[0-9]*")]
    return files or (
        [path.name for path in folder.iterdir()] if folder.is_dir() else []
    )


def has_gpu(context: Context) -> bool:
    with suppress(Unavailable):
        return bool(device_files()) or any(
            line.count(",") >= 2 for line in driver_lines(context)
        )
    return False


def _cupy_version(context: Context) -> str | None:
    versions = installed_versions(context)
    return next(
        (v for name, v in versions.items() if name.startswith("cupy") and v), None
    )


def _install_command(context: Context, what: str) -> str:
    """Return how to get CuPy or NCCL for the CUDA that the driver can run."""
    try:
        newest = max(int(line.split(".")[0]) for line in driver_lines(context))
    except (Unavailable, ValueError):
        newest = CUDA_OF_DRIVER[0][0]
    cuda = next((cuda for driver, cuda in CUDA_OF_DRIVER if newest >= driver), 12)
    versions = installed_versions(context)
    for other in (12, 13):  # NCCL must be for the CUDA of the CuPy that is there
        if versions.get(f"cupy-cuda{other}x"):
            cuda = other
    name = f"'cupy-cuda{cuda}x[ctk]'" if what == "cupy" else f"-U nvidia-nccl-cu{cuda}"
    return f"{sys.executable} -m pip install {name}"

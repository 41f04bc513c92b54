"""Checks of GPUs: driver, CuPy, NCCL, and how many of them the ranks see."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from chainermn_tools.doctor import facts
from chainermn_tools.doctor.advice import about
from chainermn_tools.doctor.check import Answer, Context, check, failed, ok, skipped, warning
from chainermn_tools.environment import gpus, probe

DRIVER_FOLDERS = (Path("/dev"), Path("/proc/driver/nvidia/gpus"))
# The first drivers of CUDA 13 and of CUDA 12.
CUDA_OF_DRIVER = ((580, 13), (525, 12))
NO_GPU = "no NVIDIA GPU here"
VISIBLE = "CUDA_VISIBLE_DEVICES"
NO_BFLOAT16 = (2, 10)  # below it


def of_driver(context: Context) -> list[str]:
    """A line for each GPU, as nvidia-smi shows them; for ``context.once``."""
    return gpus.driver(facts.seconds(context))


def of_cupy(context: Context) -> dict[str, Any]:
    """CUDA's versions and the devices that are visible; for ``context.once``."""
    found: dict[str, Any] = gpus.with_cupy(gpus.devices, facts.seconds(context))
    return found


@check("gpus", "Are there GPUs, and does their driver answer?")
def driver(context: Context) -> Answer:
    files = device_files()
    try:
        lines = context.once(of_driver)
    except probe.Unavailable as problem:
        if not files and "nvidia-smi on PATH" in str(problem):
            return skipped(NO_GPU)
        if not files:
            return skipped(f"{NO_GPU} ({problem})")
        if "nvidia-smi on PATH" in str(problem):
            return ok(f"{len(files)} GPUs; {problem}, which only shows them")
        fix = (
            "install the driver of this kernel again, or restart the machine; nvidia-smi must work"
        )
        return failed(str(problem), about(problem, fix))
    if not lines or any(line.count(",") < 2 for line in lines):
        return skipped(f"{NO_GPU}; nvidia-smi says: {' '.join(lines) or 'nothing'}")
    return ok(f"{len(lines)}: {'; '.join(lines)}", gpus=lines)


@check("cupy", "Can CuPy use the GPUs?", needs=("packages", "gpus"))
def cupy(context: Context) -> Answer:
    version = _version(context, "cupy")
    if not has_gpu(context):
        return skipped(f"{NO_GPU}; {f'CuPy {version}' if version else 'nor is CuPy installed'}")
    if version is None:
        return warning("CuPy is not installed, so ranks compute on CPUs", _install(context, "cupy"))
    setting = os.environ.get(VISIBLE)
    if setting is not None and setting.strip() in ("", "-1"):
        return warning(f"{VISIBLE} is {setting!r} and hides the GPUs", f"unset {VISIBLE}")
    try:
        found = context.once(of_cupy)
    except probe.Unavailable as problem:
        return failed(
            str(problem),
            about(problem, "see more: python -c 'import cupy; cupy.show_config()'"),
        )
    devices = found["devices"]
    if not devices:
        return failed(f"CuPy {version} sees no GPU", f'echo "[${VISIBLE}]"; nvidia-smi -L')
    said = (
        f"CuPy {version} on CUDA {found['cuda']} sees {len(devices)} GPU{'s' * (len(devices) > 1)}"
    )
    return ok(said, devices=devices)


@check("nccl", "Is NCCL there, and new enough?", needs=("cupy",))
def nccl(context: Context) -> Answer:
    if not has_gpu(context):
        return skipped(NO_GPU)
    if _version(context, "cupy") is None:
        return skipped("CuPy is not installed")
    found = gpus.with_cupy(gpus.nccl, facts.seconds(context))
    if found == "absent":
        return warning(
            "absent: gradients on GPUs take slower ways, and pure_nccl can't be used",
            _install(context, "nccl"),
        )
    oldest = probe.in_child(oldest_nccl, facts.seconds(context))
    version = tuple(map(int, found.split(".")))
    if version[:2] < tuple(oldest):
        said = f"{found} is too old; {'.'.join(map(str, oldest))} is the oldest that will do"
        return failed(said, _install(context, "nccl"))
    without = "; it doesn't know bfloat16, which 2.10 does" if version[:2] < NO_BFLOAT16 else ""
    return ok(f"{found}{without}", version=found)


@check("visible gpus", "Does CUDA_VISIBLE_DEVICES leave each rank a GPU?", needs=("cupy",))
def visible_gpus(context: Context) -> Answer:
    if not has_gpu(context) or _version(context, "cupy") is None:
        return skipped(NO_GPU if not has_gpu(context) else "CuPy is not installed")
    setting, ranks = os.environ.get(VISIBLE), context.ranks_here()
    try:
        count = len(context.once(of_cupy)["devices"])
    except probe.Unavailable:
        return skipped(f"{VISIBLE} hides the GPUs, which 'cupy' says")
    said = f"{count} visible; {VISIBLE} is " + ("not set" if setting is None else repr(setting))
    named = [part for part in (setting or "").split(",") if part.strip()]
    if setting is not None and len(named) > count:
        # CUDA takes the entries before the first one that it doesn't know.
        return failed(f"{said}, whose entry {named[count]!r} is no GPU", f"unset {VISIBLE}")
    if ranks is not None and ranks > count:
        return failed(
            f"{said}, for {ranks} ranks; NCCL refuses two ranks on one GPU",
            f"start at most {count} ranks here"
            + (f", or unset {VISIBLE}" if setting is not None else ""),
        )
    return ok(said)


def oldest_nccl() -> list[int]:
    """The oldest NCCL that will do. Call it in a child process."""
    import mpi4py

    mpi4py.rc.initialize = False  # where MPI can't start, this still has an answer
    from chainermn_comm.gpu import OLDEST_NCCL

    return list(OLDEST_NCCL)


def device_files() -> list[str]:
    """What the driver shows of GPUs in the file system."""
    devices, folder = DRIVER_FOLDERS
    files = [path.name for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return files or ([path.name for path in folder.iterdir()] if folder.is_dir() else [])


def has_gpu(context: Context) -> bool:
    """Whether there is any GPU."""
    if device_files():
        return True
    try:
        return any(line.count(",") >= 2 for line in context.once(of_driver))
    except probe.Unavailable:
        return False


def _version(context: Context, family: str) -> str | None:
    versions = context.once(facts.versions)
    found = [v for name, v in versions.items() if name.startswith(family) and v is not None]
    return found[0] if found else None


def _install(context: Context, what: str) -> str:
    """How to get CuPy or NCCL for the CUDA that the driver can run."""
    try:
        newest = max(int(line.split(".")[0]) for line in context.once(of_driver))
    except (probe.Unavailable, ValueError):
        newest = CUDA_OF_DRIVER[0][0]
    cuda = next((cuda for driver, cuda in CUDA_OF_DRIVER if newest >= driver), 12)
    versions = context.once(facts.versions)
    for other in (12, 13):  # NCCL must be for the CUDA of the CuPy that is there
        if versions.get(f"cupy-cuda{other}x"):
            cuda = other
    name = f"'cupy-cuda{cuda}x[ctk]'" if what == "cupy" else f"-U nvidia-nccl-cu{cuda}"
    return f"{sys.executable} -m pip install {name}"

"""Checks of /dev/shm, and of whether ranks may read one another's memory."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from chainermn_tools import environment
from chainermn_tools.doctor.check import CheckResult, Checks, Context, failed, ok, warning
from chainermn_tools.doctor.mpi import mpi_vendor

SHM_FOLDER = Path("/dev/shm")
MIB = 1 << 20
# MPICH 5 ends by SIGSEGV or SIGBUS as it starts with less than about 14 MiB and 5 MiB a rank;
# Open MPI 5 starts with 1 MiB, and needs some for windows.
START_BYTES, START_RANK_BYTES = 14 * MIB, 5 * MIB
OPEN_MPI_BYTES = 4 * MIB
# A communicator takes up to 4 MiB a rank, and only where 8 MiB stay free beside.
RESERVE_BYTES, RANK_BYTES = 8 * MIB, 4 * MIB
DEFAULT_RANKS = 2
RESIZE_HINT = "mount -o remount,size=1g /dev/shm   # in a container: docker run --shm-size=1g ..."

EPERM, ENOSYS = 1, 38  # of errno.h
SECRET = b"what a rank sends to another one"

checks = Checks()


@checks.add("shared memory", "Is there room in /dev/shm, where ranks of a machine meet?")
def shared_memory(context: Context) -> CheckResult:
    try:
        size = environment.shared_memory()
    except OSError as error:
        return failed(f"{SHM_FOLDER}: {error.strerror}", "mount -t tmpfs -o size=1g tmpfs /dev/shm")
    total, free = size["total_bytes"], size["free_bytes"]
    message = f"{free // MIB} MiB of {total // MIB} MiB are free"
    ranks = context.local_ranks() or DEFAULT_RANKS
    least, enough = shm_needs(ranks, mpi_vendor(context))
    if free < least and total >= enough:
        hint = f"remove what no running job needs: ls -l {SHM_FOLDER}"
        return failed(f"{message}; {_largest_file()}", hint, **size)
    if free < least:
        return failed(f"{message}: too little even for MPI itself", RESIZE_HINT, **size)
    try:
        with tempfile.TemporaryFile(dir=SHM_FOLDER) as file:
            os.posix_fallocate(file.fileno(), 0, MIB)
    except OSError as error:
        message = f"{message}, but a file can't be made there: {error.strerror}"
        hint = f"see who may write there: ls -ld {SHM_FOLDER}; df -i {SHM_FOLDER}"
        return failed(message, hint, **size)
    if free < enough:
        return warning(
            f"{message}; {ranks} ranks want {enough // MIB} MiB, and gradients would go through "
            "MPI, which is slower",
            RESIZE_HINT,
            **size,
        )
    return ok(message, **size)


def shm_needs(ranks: int, vendor: str | None) -> tuple[int, int]:
    """Return how many bytes ranks of one machine need there to start at all, and to be fast.

    Args:
        ranks: the number of ranks.
        vendor: of their MPI; None where that isn't known.
    """
    least = OPEN_MPI_BYTES if vendor == "Open MPI" else START_BYTES + ranks * START_RANK_BYTES
    return least, least + RESERVE_BYTES + ranks * RANK_BYTES


def _largest_file() -> str:
    sizes = []
    for path in SHM_FOLDER.iterdir():
        with suppress(OSError):
            sizes.append((path.stat().st_blocks * 512, path.name))
    if not sizes:
        return "no file that is seen takes it"
    nbytes, name = max(sizes)
    return f"of {len(sizes)} files the largest is {name!r}, {nbytes // MIB} MiB"


@checks.add("direct memory", "May ranks read one another's memory (CMA, process_vm_readv)?")
def direct_memory(context: Context) -> CheckResult:
    error = environment.call_in_subprocess(read_sibling_memory, context.program_timeout())
    if error == 0:
        return ok("they may")
    why = os.strerror(error)
    scope = environment.ptrace_scope()
    hint = "in a container: docker run --cap-add=SYS_PTRACE ..."
    if error == EPERM and scope:
        why, hint = f"Yama's ptrace_scope is {scope}", "sysctl kernel.yama.ptrace_scope=0"
    if not (mpi_vendor(context) or "").startswith("MVAPICH"):
        return ok(f"they may not ({why}); this MPI does without", reason=why)
    if os.environ.get("MV2_SMP_USE_CMA") == "0":
        return ok(f"they may not ({why}), and MV2_SMP_USE_CMA=0 says so", reason=why)
    message = f"they may not ({why}), and MVAPICH gives up where it expects to"
    return failed(message, f"export MV2_SMP_USE_CMA=0   # on every host; or {hint}", reason=why)


def read_sibling_memory() -> int:
    """Let one child process read another's memory, as ranks, which are siblings, would.

    Call it in a subprocess.

    Returns:
        0, or the error's number.
    """
    text = ctypes.create_string_buffer(SECRET)
    owner = os.fork()
    if owner == 0:
        signal.alarm(60)  # ends it if nobody else does
        signal.pause()
        os._exit(0)
    reader = os.fork()
    if reader == 0:
        text.value = b""  # its own copy: what is read must be the other's
        os._exit(_read_secret(owner, ctypes.addressof(text)))
    try:
        return os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
    finally:
        with suppress(ProcessLookupError):
            os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)


class IOVec(ctypes.Structure):
    """``struct iovec`` of sys/uio.h."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read_secret(pid: int, address: int) -> int:
    """Return the error's number that reading another process's SECRET gives; 0 for success."""
    target = ctypes.create_string_buffer(len(SECRET))
    local = IOVec(ctypes.addressof(target), len(SECRET))
    remote = IOVec(address, len(SECRET))
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        process_vm_readv: Any = libc.process_vm_readv
    except AttributeError:
        return ENOSYS
    process_vm_readv.restype = ctypes.c_ssize_t
    if process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) < 0:
        return ctypes.get_errno()
    return 0 if target.raw == SECRET else ENOSYS

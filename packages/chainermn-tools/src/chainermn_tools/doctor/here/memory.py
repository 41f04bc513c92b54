"""Checks of the memory that ranks of a machine share, and of that which they read directly."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from chainermn_tools import jobs
from chainermn_tools.doctor import facts
from chainermn_tools.doctor.check import Answer, Context, check, failed, ok, warning
from chainermn_tools.environment import machine, probe

FOLDER = Path("/dev/shm")
MIB = 1 << 20
# Measured with MPICH 5 as it starts: 2 ranks end by SIGSEGV or SIGBUS below 21 MiB, 4 below some
# 32, 8 need less than 48. Open MPI 5 starts with 1 MiB; there has to be some for windows.
START_BYTES, START_RANK_BYTES = 14 * MIB, 5 * MIB
LEAST_BYTES = 4 * MIB
# A communicator takes up to 4 MiB a rank, and only where 8 MiB stay free beside.
RESERVE_BYTES, RANK_BYTES = 8 * MIB, 4 * MIB
USUAL_RANKS = 2
FIX_SIZE = "mount -o remount,size=1g /dev/shm   # in a container: docker run --shm-size=1g ..."

EPERM, ENOSYS = 1, 38  # of errno.h
SECRET = b"what a rank sends to another one"


class Span(ctypes.Structure):
    """``struct iovec`` of sys/uio.h."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@check("shared memory", "Is there room in /dev/shm, where ranks of a machine meet?")
def shared_memory(context: Context) -> Answer:
    try:
        size = machine.shared_memory()
    except OSError as problem:
        return failed(f"{FOLDER}: {problem.strerror}", "mount -t tmpfs -o size=1g tmpfs /dev/shm")
    total, free = size["total_bytes"], size["free_bytes"]
    said = f"{free // MIB} MiB of {total // MIB} MiB are free"
    ranks = context.ranks_here() or USUAL_RANKS
    least, enough = room_for(ranks, _vendor(context))
    if free < least:
        if total >= enough:
            fix = f"remove what no running job needs: ls -l {FOLDER}"
            return failed(f"{said}; {_largest()}", fix, **size)
        return failed(f"{said}: too little even for MPI itself", FIX_SIZE, **size)
    try:
        with tempfile.TemporaryFile(dir=FOLDER) as file:
            os.posix_fallocate(file.fileno(), 0, MIB)
    except OSError as problem:
        said = f"{said}, but a file can't be made there: {problem.strerror}"
        return failed(said, f"see who may write there: ls -ld {FOLDER}; df -i {FOLDER}", **size)
    if free < enough:
        return warning(
            f"{said}; {ranks} ranks want {enough // MIB} MiB, and gradients would go through MPI, "
            "which is slower",
            FIX_SIZE,
            **size,
        )
    return ok(said, **size)


def room_for(ranks: int, vendor: str | None) -> tuple[int, int]:
    """How many bytes ranks of one machine need there to start at all, and to be fast.

    Args:
        ranks: how many.
        vendor: of their MPI; None where that isn't known.
    """
    least = LEAST_BYTES if vendor == "Open MPI" else START_BYTES + ranks * START_RANK_BYTES
    return least, least + RESERVE_BYTES + ranks * RANK_BYTES


@check("direct memory", "May ranks read one another's memory (CMA, process_vm_readv)?")
def direct_memory(context: Context) -> Answer:
    """Tried between two processes that are siblings, as ranks are."""
    error = probe.call_in_subprocess(read_of_sibling, facts.seconds(context))
    if error == 0:
        return ok("they may")
    why = os.strerror(error)
    scope = machine.ptrace_scope()
    if error == EPERM and scope:
        why, fix = f"Yama's ptrace_scope is {scope}", "sysctl kernel.yama.ptrace_scope=0"
    else:
        fix = "in a container: docker run --cap-add=SYS_PTRACE ..."
    vendor = _vendor(context)
    if vendor is None or not vendor.startswith("MVAPICH"):
        return ok(f"they may not ({why}); this MPI does without", reason=why)
    if os.environ.get("MV2_SMP_USE_CMA") == "0":
        return ok(f"they may not ({why}), and MV2_SMP_USE_CMA=0 says so", reason=why)
    said = f"they may not ({why}), and MVAPICH gives up where it expects to"
    return failed(said, f"export MV2_SMP_USE_CMA=0   # on every host; or {fix}", reason=why)


def read_of_sibling() -> int:
    """Read a sibling's memory. Call it in a child process.

    Returns:
        0, or the error's number.
    """
    text = ctypes.create_string_buffer(SECRET)
    owner = os.fork()
    if owner == 0:
        signal.alarm(60)  # the end, should nobody else bring it
        signal.pause()
        os._exit(0)
    reader = os.fork()
    if reader == 0:
        text.value = b""  # its own copy: what is read must be the other's
        os._exit(_read(owner, ctypes.addressof(text)))
    try:
        return os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1])
    finally:
        with suppress(ProcessLookupError):
            os.kill(owner, signal.SIGKILL)
        os.waitpid(owner, 0)


def _read(pid: int, address: int) -> int:
    """The error's number that reading another process's SECRET gives; 0 when it was read."""
    target = ctypes.create_string_buffer(len(SECRET))
    local = Span(ctypes.addressof(target), len(SECRET))
    remote = Span(address, len(SECRET))
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        call: Any = libc.process_vm_readv
    except AttributeError:
        return ENOSYS
    call.restype = ctypes.c_ssize_t
    read = call(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    if read < 0:
        return ctypes.get_errno()
    return 0 if target.raw == SECRET else ENOSYS


def _vendor(context: Context) -> str | None:
    try:
        return str(context.once(facts.library)["vendor"])
    except jobs.Unavailable:
        return None


def _largest() -> str:
    """What takes most of the room."""
    sizes = []
    for path in FOLDER.iterdir():
        with suppress(OSError):
            sizes.append((path.stat().st_blocks * 512, path.name))
    if not sizes:
        return "no file that is seen takes it"
    nbytes, name = max(sizes)
    return f"of {len(sizes)} files the largest is {name!r}, {nbytes // MIB} MiB"

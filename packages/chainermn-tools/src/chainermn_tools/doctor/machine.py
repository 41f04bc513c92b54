"""Checks of shared memory and of cores."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from _chainermn_limits import chosen_thread_variables
from chainermn_tools import environment, jobs
from chainermn_tools.doctor.check import (
    CheckResult,
    Checks,
    Context,
    failed,
    ok,
    warning,
)
from chainermn_tools.doctor.software import mpi_vendor

SHM_FOLDER = Path("/dev/shm")
MIB = 1 << 20
# MPICH 5 ends by SIGSEGV or SIGBUS as it starts with less than about 14 MiB and 5 MiB a
# rank; Open MPI 5 starts with 1 MiB, and needs some for windows.
START_BYTES, START_RANK_BYTES = 14 * MIB, 5 * MIB
OPEN_MPI_BYTES = 4 * MIB
# A communicator takes up to 4 MiB a rank, and only where 8 MiB stay free beside.
RESERVE_BYTES, RANK_BYTES = 8 * MIB, 4 * MIB
DEFAULT_RANKS = 2  # as few as can find one another
RESIZE_HINT = (
    "mount -o remount,size=1g /dev/shm   # in a container: docker run --shm-size=1g ..."
)

checks = Checks()


@checks.add("shared_memory", "Is there enough room in /dev/shm, which ranks share?")
def shared_memory(context: Context) -> CheckResult:
    try:
        size = environment.shared_memory()
    except OSError as error:
        return failed(
            f"{SHM_FOLDER}: {error.strerror}",
            "mount -t tmpfs -o size=1g tmpfs /dev/shm",
        )
    total, free = size["total_bytes"], size["free_bytes"]
    message = f"{free // MIB} MiB of {total // MIB} MiB are free"
    ranks = context.local_ranks() or DEFAULT_RANKS
    least, enough = shm_needs(ranks, mpi_vendor(context))
    if free < least and total >= enough:
        hint = f"remove what no running job needs: ls -lS {SHM_FOLDER}"
        return failed(message, hint, **size)
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
        message += f"; {ranks} ranks want {enough // MIB} MiB, and gradients would go through MPI"
        return warning(f"{message}, which is slower", RESIZE_HINT, **size)
    return ok(message, **size)


def shm_needs(ranks: int, vendor: str | None) -> tuple[int, int]:
    """Return how many bytes ranks of one machine need there to start at all, and to be fast."""
    least = (
        OPEN_MPI_BYTES
        if vendor == "Open MPI"
        else START_BYTES + ranks * START_RANK_BYTES
    )
    return least, least + RESERVE_BYTES + ranks * RANK_BYTES


@checks.add("cores", "Are there enough cores for the ranks and their BLAS threads?")
def cores(context: Context) -> CheckResult:
    found = jobs.available_cores()
    usable, ranks = found["usable"], context.local_ranks()
    message = f"{usable} of the machine's {found['machine']} cores may be used"
    if ranks is not None and ranks > usable:
        hint = f"start at most {usable} ranks here, or ask for more cores"
        return warning(f"{message}, for {ranks} ranks: they take turns", hint, **found)
    chosen = chosen_thread_variables({})
    for name in chosen:
        value = os.environ[name].split(",")[0].strip()
        if value.isdigit() and int(value) * (ranks or 1) > usable:
            message += f"; {name} is {value}" + (
                f", for each of {ranks} ranks" if ranks else ""
            )
            return warning(
                message, f"export {name}={max(1, usable // (ranks or 1))}", **found
            )
    if chosen:
        return ok(
            f"{message}; {', '.join(f'{n} is {os.environ[n]}' for n in chosen)}",
            **found,
        )
    return ok(
        f"{message}; communicators limit the BLAS of each rank to its share", **found
    )

"""Checks of shared memory and of cores."""

from __future__ import annotations

import os

from _chainermn_limits import chosen_thread_variables
from chainermn_tools.doctor.check import (
    DEFAULT_RANKS,
    CheckResult,
    Checks,
    Context,
    failed,
    ok,
    warning,
)
from chainermn_tools.doctor.software import mpi_vendor

SHM_FOLDER = "/dev/shm"
MIB = 1 << 20
# With less than about 14 MiB and 5 MiB per rank, MPICH 5 ends by SIGSEGV or SIGBUS when
# it starts. Open MPI 5 starts with 1 MiB, and needs more for windows.
START_BYTES = 14 * MIB
START_RANK_BYTES = 5 * MIB
OPEN_MPI_BYTES = 4 * MIB
# A communicator takes up to 4 MiB per rank, and only if 8 MiB stay free.
RESERVE_BYTES = 8 * MIB
RANK_BYTES = 4 * MIB
RESIZE_HINT = (
    "mount -o remount,size=1g /dev/shm   # in a container: docker run --shm-size=1g ..."
)

checks = Checks()


@checks.add("shared_memory", "Is there enough room in /dev/shm, which ranks share?")
def shared_memory(context: Context) -> CheckResult:
    size = context.facts["machine"]["shared_memory"]
    if "unavailable" in size:
        hint = "mount -t tmpfs -o size=1g tmpfs /dev/shm"
        return failed(f"{SHM_FOLDER}: {size['unavailable']}", hint)
    ranks = context.local_ranks() or DEFAULT_RANKS
    return check_size(size, ranks, mpi_vendor(context))


def check_size(size: dict[str, int], ranks: int, vendor: str | None) -> CheckResult:
    """Check whether a machine's ranks can start, and be fast, with this much shared memory."""
    total = size["total_bytes"]
    free = size["free_bytes"]
    if vendor == "Open MPI":
        least = OPEN_MPI_BYTES
    else:
        least = START_BYTES + ranks * START_RANK_BYTES
    enough = least + RESERVE_BYTES + ranks * RANK_BYTES
    message = f"{free // MIB} MiB of {total // MIB} MiB are free"
    hint = RESIZE_HINT
    if total >= enough:
        hint = f"ls -lS {SHM_FOLDER}   # and remove what no running job needs"
    if free < least:
        return failed(f"{message}, too little for ranks to start", hint, **size)
    if free < enough:
        message += f"; {ranks} ranks are fast only with {enough // MIB} MiB or more"
        return warning(message, hint, **size)
    return ok(message)


@checks.add("cores", "Are there enough cores for the ranks and their BLAS threads?")
def cores(context: Context) -> CheckResult:
    found = context.facts["machine"]["cores"]
    usable = found["usable"]
    ranks = context.local_ranks() or 1
    message = f"{usable} of the machine's {found['machine']} cores may be used"
    if ranks > usable:
        hint = f"start at most {usable} ranks here, or ask for more cores"
        return warning(f"{message}, and {ranks} ranks take turns", hint, **found)
    for name in chosen_thread_variables({}):
        value = os.environ[name].split(",")[0].strip()
        if value.isdigit() and int(value) * ranks > usable:
            message += f"; {name}={value} is too many for each rank"
            return warning(message, f"export {name}={usable // ranks}", **found)
    return ok(message)

"""The memory in which a rank records its calls, and which the monitor maps: layout and reading.

The status region has a slot for each communicator and lies in an anonymous file of the
rank, so that nothing can be left behind. Times are `time.monotonic()`, which a
machine's processes share.
"""

from __future__ import annotations

import mmap
import signal
import struct
from dataclasses import dataclass

from ..observers import NOBODY as NOBODY

SLOT_BYTES = 192
# MPICH gives a process at most 2,046 communicators. Pages never touched take no memory.
SLOTS = 4096
REGION_BYTES = (1 + SLOTS) * SLOT_BYTES
# Where slots begin. They are used in this order.
SLOTS_AT = range(SLOT_BYTES, REGION_BYTES, SLOT_BYTES)

# At the start of the region: when this rank called MPI_Abort, else 0; its calls of
# `update`, and the examples in them.
HEADER = struct.Struct("<dqq")
HEADER_AT = slice(HEADER.size)
# At the start of a slot: the communicator, this process's rank in it, and its size (0:
# the slot is free).
IDENTITY = struct.Struct("<qii")
# Then: state, when it began, collective calls so far, bytes, peer or root, tag, name.
CALL = struct.Struct("<B7xdQqii128s")
# The state and its time alone.
STATE_AND_TIME = struct.Struct("<B7xd")
IDLE = 0
COLLECTIVE = 1
MESSAGE = 2
# In an operation's name, before the function that the call is part of.
SCOPE_SEPARATOR = ", inside "

# The signal that makes a rank write its stacks. SIGUSR1 and SIGUSR2 belong to scripts and
# schedulers.
STACKS_SIGNAL = signal.SIGRTMAX - 5
# The communicator of calls that all ranks of the job make: creating communicators, and
# exiting.
WORLD = -1
FINALIZE = "MPI_Finalize"


@dataclass(frozen=True)
class Call:
    """The call that a rank is in, or was in last, on a communicator."""

    communicator: int  # its unique number, the same on all its ranks
    rank: int  # this rank's number there
    size: int  # number of its ranks
    state: int  # IDLE, COLLECTIVE or MESSAGE
    age: float  # seconds since the state began
    sequence: int  # collective calls so far
    nbytes: int  # of this rank's payload; 0 if unknown
    peer: int  # the other rank or the root, in this communicator's numbers; or NOBODY
    tag: int  # of a message; otherwise NOBODY
    operation: str  # its name; if the state is IDLE, the last call's

    @property
    def waits(self) -> bool:
        return self.state != IDLE


def read_calls(region: mmap.mmap, now: float, awake_since: float = 0.0) -> list[Call]:
    """Return the call of each slot in use; ages are counted up to ``now``.

    Nobody can be said to have waited before ``awake_since``.
    """
    calls = []
    for start in SLOTS_AT:
        contents = _read_whole(region, slice(start, start + SLOT_BYTES))
        communicator, rank, size = IDENTITY.unpack_from(contents)
        state, since, sequence, nbytes, peer, tag, name = CALL.unpack_from(
            contents, IDENTITY.size
        )
        if since == 0:  # no communicator has ever had this slot, or any slot behind it
            break
        if size == 0:
            continue
        calls.append(
            Call(
                communicator=communicator,
                rank=rank,
                size=size,
                state=state,
                age=max(0.0, now - max(since, awake_since)),
                sequence=sequence,
                nbytes=nbytes,
                peer=peer,
                tag=tag,
                operation=name.rstrip(b"\0").decode(errors="replace"),
            )
        )
    return calls


def _read_whole(region: mmap.mmap, where: slice) -> bytes:
    """Return a slot's contents, read until the rank isn't just writing them."""
    contents = region[where]
    while (again := region[where]) != contents:
        contents = again
    return contents

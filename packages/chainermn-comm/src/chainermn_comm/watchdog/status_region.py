"""What ranks note of their calls, and where it lies in the memory that the monitor maps.

A slot for each communicator, in an anonymous file for each rank: nothing of it has a name, so
nothing can be left behind. Times are `time.monotonic()`, which a machine's processes share.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass

SLOT_BYTES = 192
# MPICH gives a process at most 2,046 communicators. Pages never touched take no memory.
SLOTS = 4096
AREA_BYTES = (1 + SLOTS) * SLOT_BYTES

# At the start of the area: slots ever used; when this rank called MPI_Abort, else 0.
HEADER = struct.Struct("<Id")
USED = struct.Struct("<I")
# After it: what the process is inside of, since when, in words.
DOING_AT = 16
DOING = struct.Struct("<B7xd64s")
NOTHING, PART, ALONE = 0, 1, 2
# At the start of a slot: the communicator, as the world's number of its rank 0 and how many that
# rank had made before; this process's rank in it, and its size (0: the slot is free).
IDENTITY = struct.Struct("<qqii")
# Then: state, when that began, collective calls so far, bytes, peer or root, tag, operation.
CALL = struct.Struct("<B7xdQqii120s")
# The first two of these.
LEFT = struct.Struct("<B7xd")
# Then: how often that was written, twice each time, so that it is odd meanwhile (a sequence lock).
# Zero is none, since it is written first.
VERSION = struct.Struct("<Q")
VERSION_AT = IDENTITY.size + CALL.size
FIRST_VERSION = 2
# Writing takes less than a microsecond, unless the process is stopped in the middle.
TRIES = 100
OUTSIDE, COLLECTIVE, MESSAGE = 0, 1, 2
# In an operation's name, before the function that it is part of.
INSIDE = ", inside "

# The communicator of what all ranks of the job do: making communicators, and ending.
EVERYBODY = (-1, -1)
FINALIZE = "MPI_Finalize"
NOBODY = -1


@dataclass(frozen=True)
class Call:
    """What a rank does, or did last, on a communicator.

    Attributes:
        communicator: the same on all its ranks.
        rank: this rank's number there.
        size: number of its ranks.
        state: OUTSIDE, COLLECTIVE or MESSAGE.
        age: seconds since that began.
        sequence: collective calls so far.
        nbytes: payload of this rank, 0 where it isn't known.
        peer: the other rank or the root, in this communicator's numbers; or NOBODY.
        tag: of the message; or NOBODY.
        operation: its name; of the last call where the state is OUTSIDE.
    """

    communicator: tuple[int, int]
    rank: int
    size: int
    state: int
    age: float
    sequence: int
    nbytes: int
    peer: int
    tag: int
    operation: str

    @property
    def waits(self) -> bool:
        return self.state != OUTSIDE


@dataclass(frozen=True)
class Doing:
    """What a rank is inside of.

    Attributes:
        what: in words.
        age: seconds since then.
        alone: whether the others may have to wait for it for long.
    """

    what: str
    age: float
    alone: bool


def offset_of(slot: int) -> int:
    """Where a slot begins in its area."""
    return (1 + slot) * SLOT_BYTES


def read(area: mmap.mmap, now: float) -> list[Call]:
    """The calls that an area tells of."""
    used, _ = HEADER.unpack_from(area)
    found = []
    for slot in range(min(used, SLOTS)):
        contents, is_whole = _slot(area, offset_of(slot))
        first, count, rank, size = IDENTITY.unpack_from(contents)
        if size == 0:
            continue
        state, since, sequence, nbytes, peer, tag, name = CALL.unpack_from(contents, IDENTITY.size)
        operation = name.rstrip(b"\0").decode(errors="replace")
        age = max(0.0, now - since)
        if not is_whole:  # the rank is about to note something, so it doesn't wait
            state, age = OUTSIDE, 0.0
        known = sequence, nbytes, peer, tag, operation
        found.append(Call((first, count), rank, size, state, age, *known))
    return found


def _slot(area: mmap.mmap, start: int) -> tuple[bytes, bool]:
    """What stands in a slot, and whether nothing of it was being written meanwhile."""
    for _ in range(TRIES):
        (before,) = VERSION.unpack_from(area, start + VERSION_AT)
        contents = area[start : start + SLOT_BYTES]
        if (
            before
            and before % 2 == 0
            and VERSION.unpack_from(area, start + VERSION_AT) == (before,)
        ):
            return contents, True
    return contents, False


def aborting_since(area: mmap.mmap) -> float:
    """When the rank called MPI_Abort; 0 if it hasn't."""
    return float(HEADER.unpack_from(area)[1])


def doing(area: mmap.mmap, now: float) -> Doing | None:
    """What the rank is inside of, if it said so."""
    contents = b""
    while contents != (contents := area[DOING_AT : DOING_AT + DOING.size]):
        pass  # it was being written
    kind, since, what = DOING.unpack(contents)
    if kind == NOTHING:
        return None
    return Doing(what.rstrip(b"\0").decode(errors="replace"), max(0.0, now - since), kind == ALONE)

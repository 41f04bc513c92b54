"""What tests look at inside of communicators, and plant there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from chainermn_comm.gradients import bucket
from chainermn_comm.layout import Chunk
from chainermn_comm.messaging import Handshake
from chainermn_comm.sums import factories, pairwise, verbs
from chainermn_comm.sums.shared_window import SharedWindow


@contextmanager
def recorded_sizes():
    """Bytes of each chunk `packed` on this rank meanwhile, and of each message `sent`."""
    found = {"packed": [], "sent": []}
    pack = Chunk.pack
    exchange = pairwise.start_exchange

    def packing(self: Chunk, operand, out):
        found["packed"].append(self.nbytes)
        pack(self, operand, out)

    def exchanging(comm, outgoing, *rest):
        outgoing = list(outgoing)
        found["sent"] += [buffer.nbytes for _, buffer in outgoing]
        return exchange(comm, outgoing, *rest)

    with (
        mock.patch.object(Chunk, "pack", packing),
        mock.patch.object(pairwise, "start_exchange", exchanging),
    ):
        yield found


LONGEST_SECONDS = 0.004


@contextmanager
def late_ranks(rank: int, likelihood: float):
    """Meanwhile this rank pauses before and after barriers, as its number decides."""
    rng = random.Random(rank)

    def pause():
        if rng.random() < likelihood:
            time.sleep(rng.random() * LONGEST_SECONDS)

    def late(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **how: (pause(), method(*args, **how), pause())[1]

    # The handshake is the first barrier of a call.
    with (
        mock.patch.object(SharedWindow, "barrier", late(SharedWindow.barrier)),
        mock.patch.object(Handshake, "__call__", late(Handshake.__call__)),
    ):
        yield


def is_in_shared_memory(array: np.ndarray) -> bool:
    """Whether the array begins in memory that this process shares."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, flags, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if flags.endswith("s") and start <= array.ctypes.data < end:
            return True
    return False


# What is allocated, and where.
MOMENTS = {
    "replaced gradients": (bucket, "_targets"),
    "gradients of zeros": (bucket.Bucket, "add_zeros"),
    "room for a sum": (verbs, "_prepared"),
    "the first use": (factories, "_through_shared_memory"),
}


def no_memory_for(what: str, here: bool = True) -> AbstractContextManager[Any]:
    """Meanwhile that can't be allocated; on ranks that aren't `here`, all is as ever."""
    failing = mock.patch.object(*MOMENTS[what], side_effect=MemoryError("no room here"))
    if here:
        return failing
    return nullcontext()

"""Memory that other processes map too: which it is, and what may go wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from chainermn_comm.sums import shared_window


def is_in_shared_memory(array: np.ndarray) -> bool:
    """Whether the array begins in memory that this process shares."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, flags, *_ = line.split()
        start, end = (int(address, 16) for address in addresses.split("-"))
        if flags.endswith("s") and start <= array.ctypes.data < end:
            return True
    return False


def on_an_old_kernel() -> None:
    """From now on memory can't be taken without touching it, as before Linux 5.14."""
    shared_window.MADV_POPULATE_WRITE = 999


def taken_after_the_check() -> None:
    """From now on others take the memory between the check that there is some and its use."""
    shared_window.obstacle = lambda nbytes: ""

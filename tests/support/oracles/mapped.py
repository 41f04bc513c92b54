"""Which file an array's memory is mapped from, in any process."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import numpy as np
from chainer.dataset import DatasetMixin


def lies_in(array: np.ndarray) -> tuple[str, str] | None:
    """Device and number of the file that the array is mapped from; number "0" if none."""
    address = array.__array_interface__["data"][0]
    with open("/proc/self/maps") as file:
        for line in file:
            place, _, _, device, inode, *_ = line.split()
            begin, end = (int(each, 16) for each in place.split("-"))
            if begin <= address < end:
                return device, inode
    return None


class Reporting(DatasetMixin):
    """Says beside each example which process made it, and which file it lies in there.

    What a worker process writes to the example afterwards is in nobody else's.
    """

    def __init__(self, part: Any) -> None:
        self.part = part

    def __len__(self) -> int:
        return len(self.part)

    def get_example(self, i: int) -> tuple[np.ndarray, int, Any]:
        example = self.part[i]
        found = example.copy(), os.getpid(), lies_in(example)
        if multiprocessing.parent_process() is not None:
            example[...] = -1
        return found

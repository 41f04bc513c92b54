"""What the ranks of a node would do if they shared no work."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from chainermn_comm.sums import shared_memory


def by_each_rank_of(size: int) -> AbstractContextManager[object]:
    """Meanwhile, each rank of a new communicator of that size takes all sums itself."""
    return mock.patch.object(shared_memory, "REDUNDANT_RANKS", size)

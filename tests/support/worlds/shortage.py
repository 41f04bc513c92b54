"""Memory that some rank doesn't get, at a chosen moment."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from chainermn_comm.gradients import bucket
from chainermn_comm.sums import factories, verbs

# What is allocated, and where.
MOMENTS: dict[str, tuple[Any, str]] = {
    "replaced gradients": (bucket, "_targets"),
    "gradients of zeros": (bucket.Bucket, "add_zeros"),
    "room for a sum": (verbs, "_prepared"),
    "the first use": (factories, "_through_shared_memory"),
}


def no_memory_for(what: str, here: bool = True) -> AbstractContextManager[Any]:
    """Meanwhile that can't be allocated; on ranks that aren't `here`, all is as ever."""
    failing = mock.patch.object(*MOMENTS[what], side_effect=MemoryError("no room here"))
    return failing if here else nullcontext()

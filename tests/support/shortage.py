"""Memory that some rank doesn't get, at a chosen moment."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

from chainermn_comm import allreduce, gradients, messages, plans

# What is allocated, and where.
MOMENTS: dict[str, tuple[Any, str]] = {
    "replaced gradients": (gradients, "_targets"),
    "gradients of zeros": (gradients, "_zeros"),
    "copies to sum in": (allreduce, "_copied"),
    "a message": (messages, "allocate"),
    "a received array": (messages, "room"),
    "the first use": (plans, "_through_nodes"),
}


def no_memory_for(what: str, here: bool = True) -> AbstractContextManager[Any]:
    """Meanwhile that can't be allocated; on ranks that aren't `here`, all is as ever."""
    failing = mock.patch.object(*MOMENTS[what], side_effect=MemoryError("no room here"))
    return failing if here else nullcontext()

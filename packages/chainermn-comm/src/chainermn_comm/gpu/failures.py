"""CUDA's and NCCL's errors as CommunicationError, which every rank raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .. import devices
from ..messaging import Context

Value = TypeVar("Value")


def on_all_ranks(context: Context, what: str, make: Callable[[], Value]) -> Value:
    """Return what ``make`` returns, once it has returned on all ranks (collective).

    A device's error is a CommunicationError there and a PeerError elsewhere. ``what`` is done, for
    the message; it may differ by rank.
    """

    def attempt() -> Value:
        with devices.translated_errors(what):
            return make()

    return context.run_on_all_ranks("averaging gradients on GPUs", attempt)

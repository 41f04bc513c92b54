"""Ranks that now and then enter a barrier late, or leave it late."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from chainermn_comm.messaging import Handshake
from chainermn_comm.sums.shared_window import SharedWindow

LONGEST_SECONDS = 0.004


@contextmanager
def late_ranks(rank: int, likelihood: float) -> Iterator[None]:
    """Meanwhile this rank pauses before and after barriers, as its number decides."""
    rng = random.Random(rank)

    def pause() -> None:
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

"""Says at once when backward will never come to a `send` or `recv`: here, and to the other rank.

Nothing else would: half of a model would not be trained, or a rank would wait in vain.
"""

from __future__ import annotations

import sys
import warnings
from collections import deque
from typing import NoReturn
from weakref import ref

from chainermn_comm import CommunicatorBase, RankMismatchError

from .messages import GRADIENT_TAG, SEND, note

# Why there will be no gradients, and what to do, as the rank that waits for them is told.
NO_BACKPROP, DROPPED = 1, 2
REASONS = {
    NO_BACKPROP: (
        "called recv in no_backprop_mode; use the mode on both ranks, or send what needs no "
        "gradient (the variable's array)"
    ),
    DROPPED: (
        "dropped what recv returned before backward came to it; run backward through it, connect "
        "it to the loss with pseudo_connect, or send without gradients"
    ),
}
# So many at most are kept, or told: who drops without end evaluates, and was warned.
MOST = 1000

# How the sends were called that were dropped though a gradient may come for them, by number.
_dropped: deque[tuple[int, str]] = deque(maxlen=MOST)
# Sends whose backward raised when it met such a one's gradients, and whose own are yet to come.
_abandoned: deque[int] = deque(maxlen=MOST)
# What is still to be refused: where, to whom, and the number of the letter.
_pending: deque[tuple[ref[CommunicatorBase], int, int]] = deque(maxlen=MOST)
_told = 0


def refuse(communicator: CommunicatorBase, peer: int, number: int, reason: int) -> None:
    """Tell a rank that its letter of this number gets no gradients."""
    communicator.send_noted(note(b"", refusal=reason), (), peer, GRADIENT_TAG, SEND, number)


def refuse_dropped(communicator: CommunicatorBase) -> None:
    """Tell other ranks of what was dropped here; before each call that may wait for them."""
    global _told
    if not _pending:  # nearly always
        return
    for _ in range(len(_pending)):
        entry = where, peer, number = _pending.popleft()
        if where() is communicator and _told < MOST:
            _told += 1
            refuse(communicator, peer, number, DROPPED)
        elif where() is not None and _told < MOST:
            _pending.append(entry)


def raise_refused(here: int, peer: int, tag: int, reason: int) -> NoReturn:
    """Raise what a refusal says, on the rank that waited for gradients."""
    raise RankMismatchError(
        f"rank {here}: backward of send(rank={peer}, tag={tag}) gets no gradients: rank {peer} "
        f"{REASONS[reason]}"
    )


def send_was_dropped(number: int, here: int, peer: int, tag: int) -> None:
    """Warn; called by ``__del__``, and that by the line that drops the last reference."""
    if sys.is_finalizing():  # what lives until the end was not dropped
        return
    call = f"send(rank={peer}, tag={tag})"
    _dropped.append((number, call))
    warnings.warn(
        f"rank {here}: the delegate variable that {call} returned was dropped before "
        "backward came to it: what was sent gets no gradient. Keep it with pseudo_connect or as "
        "delegate_variable of the next recv, or call its backward; or send without gradients, "
        "in no_backprop_mode or the variable's array",
        RuntimeWarning,
        stacklevel=3,
    )


def recv_was_dropped(communicator: CommunicatorBase, peer: int, tag: int, number: int) -> None:
    """Likewise; the other rank is told by this one's next call, as nothing may be sent here."""
    if sys.is_finalizing():
        return
    _pending.append((ref(communicator), peer, number))
    warnings.warn(
        f"rank {communicator.rank}: what recv(rank={peer}, tag={tag}) returned was dropped before "
        f"backward came to it: backward on rank {peer} gets no gradients. Run backward through "
        "it, or send without gradients, in no_backprop_mode or the variable's array",
        RuntimeWarning,
        stacklevel=3,
    )


def abandon(number: int) -> None:
    """Remember a send whose backward raises, so that nobody raises again for its gradients."""
    _abandoned.append(number)


def was_abandoned(number: int) -> bool:
    """Whether :func:`abandon` was called for the send."""
    return number in _abandoned


def call_of_dropped(number: int) -> str | None:
    """How the send was called that was dropped and had this number; None if there is none."""
    return dict(_dropped).get(number)

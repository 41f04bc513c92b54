"""Cancellation of gradients: reports at once that backward will never come to a send or recv.

Otherwise half of a model would not be trained, or the other rank would wait for ever.
"""

from __future__ import annotations

import sys
import warnings
from weakref import WeakKeyDictionary

from chainermn_comm import CommunicatorBase

from .messages import Edge, Header, message_ids, send_message

# The reasons why no gradients come. The waiting rank reports these texts, which name
# remedies.
NO_BACKPROP = 1
DROPPED = 2
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
# The most cancellations that a process sends. A user who drops more messages probably
# evaluates a model, and has been warned.
MAX_CANCELLATIONS = 1000

# Received messages whose variables were dropped on this rank: each one's sender, which must
# be notified, and its id.
_pending: WeakKeyDictionary[CommunicatorBase, list[tuple[int, int]]] = (
    WeakKeyDictionary()
)
_num_sent = 0


def send_cancellation(
    communicator: CommunicatorBase, peer: int, message_id: int, reason: int
) -> None:
    """Notify a rank, MAX_CANCELLATIONS times at most, that its message gets no gradients."""
    global _num_sent
    if _num_sent >= MAX_CANCELLATIONS:
        return
    _num_sent += 1
    edge = Edge(communicator, peer, communicator.reserved_tag)
    send_message(Header(next(message_ids), message_id, reason), (), edge)


def send_pending_cancellations(communicator: CommunicatorBase) -> None:
    """Tell senders that their messages were dropped; call this before anything that may wait."""
    for peer, message_id in _pending.pop(communicator, ()):
        send_cancellation(communicator, peer, message_id, DROPPED)


def cancel_later(communicator: CommunicatorBase, peer: int, message_id: int) -> None:
    """Let the next call tell a rank that its message was dropped: ``__del__`` may not send."""
    _pending.setdefault(communicator, []).append((peer, message_id))


def warn_dropped(what: str, consequence: str) -> None:
    """Warn at the line that drops the last reference; only ``__del__`` calls this."""
    if sys.is_finalizing():  # objects that live until the end were not dropped
        return
    warnings.warn(
        f"{what} returned was dropped before backward came to it: {consequence}; or send "
        "without gradients, in no_backprop_mode or the variable's array",
        RuntimeWarning,
        stacklevel=3,
    )

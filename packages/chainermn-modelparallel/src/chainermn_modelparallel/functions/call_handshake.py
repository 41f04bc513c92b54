"""The handshake before a collective call of a function, forward or backward, moves any data.

If ranks call different functions, or run backward through them in different orders, all
ranks raise here. All ranks also raise if one of them can't take part.
"""

from __future__ import annotations

import itertools
import struct
from typing import Any, NamedTuple

import chainer

from chainermn_comm import CommunicatorBase, RankMismatchError

from .cancellation import send_pending_cancellations
from .ordered_function import SCOPE

# Entries that must be equal on all ranks: tuples of a name and its values.
Signature = tuple[tuple[Any, ...], ...]

# This call's number, and whether this rank needs a gradient and builds a graph.
_PREFIX = struct.Struct("<Q??")
_ADVICE = (
    ". Call the same functions in the same order on all ranks; where backward comes to them in "
    "different orders, connect one's result to the next one's input with pseudo_connect"
)
_call_numbers = itertools.count()


class Handshake(NamedTuple):
    """The facts about a call that all ranks know after its handshake."""

    call_id: int  # rank 0's count of calls, by which backward refers to this one
    # Whether some rank needs a gradient; backward is then collective.
    requires_grad: bool
    payloads: list[bytes]  # each rank's bytes, in rank order
    # The ranks that build no graph, if some rank needs a gradient. Backward can't run on
    # them, so it must not run on any rank.
    without_graph: list[int]

    def require_graph(self, operation: str, rank: int) -> None:
        """Raise RankMismatchError if some rank can't run backward."""
        if self.without_graph:
            raise RankMismatchError(
                f"{operation} on rank {rank}: some ranks need its gradients, but ranks "
                f"{self.without_graph} don't build a graph; use no_backprop_mode (and "
                "enable_double_backprop) on all ranks or on none"
            )


def handshake(
    comm: CommunicatorBase,
    operation: str,
    signature: Signature = (),
    *,
    requires_grad: bool = False,
    payload: bytes = b"",
    forward: Handshake | None = None,
) -> Handshake:
    """Do the communicator's ``handshake``, and learn whether some rank needs a gradient.

    Collective. ``requires_grad`` says whether this rank needs a gradient. Backward
    passes as ``forward`` the handshake of the call whose gradients it exchanges, so
    that two similar calls can't swap their gradients. ``operation`` is the function's
    name, without ``chainermn.functions``.

    Raises:
        RankMismatchError: on all ranks, if the operations, the signatures or the ids of
            the ``forward`` calls differ, or if some rank builds no graph of gradients
            that another rank can differentiate again.
        PeerError: another rank raised an error before it came here.
    """
    send_pending_cancellations(comm)
    if forward is not None:
        signature = (("the call", forward.call_id), *signature)
    builds_graph = chainer.config.enable_backprop
    prefix = _PREFIX.pack(next(_call_numbers), requires_grad, builds_graph)
    try:
        rows = comm.handshake(SCOPE + operation, signature, payload=prefix + payload)
    except RankMismatchError as mismatch:
        if mismatch.entry in ("operation", "the call"):
            mismatch.args = (f"{mismatch}{_ADVICE}",)
        raise
    prefixes = [_PREFIX.unpack_from(row) for row in rows]
    numbers, require_grad, build_graph = zip(*prefixes, strict=True)
    is_needed = any(require_grad)
    without_graph = [
        rank for rank, builds in enumerate(build_graph) if is_needed and not builds
    ]
    payloads = [row[_PREFIX.size :] for row in rows]
    call = Handshake(numbers[0], is_needed, payloads, without_graph)
    if forward is not None:
        call.require_graph(operation, comm.rank)
    return call

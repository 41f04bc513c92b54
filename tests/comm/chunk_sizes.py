"""How large the pieces are in which gradients are packed and sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from chainermn_comm.layout import Chunk
from chainermn_comm.sums import pairwise


@contextmanager
def recorded_sizes() -> Iterator[dict[str, list[int]]]:
    """Bytes of each chunk `packed` on this rank meanwhile, and of each message `sent`."""
    found: dict[str, list[int]] = {"packed": [], "sent": []}
    pack = Chunk.pack
    exchange = pairwise.start_exchange

    def packing(self: Chunk, operand: Any, out: Any) -> None:
        found["packed"].append(self.nbytes)
        pack(self, operand, out)

    def exchanging(comm: Any, outgoing: Any, *rest: Any) -> Any:
        outgoing = list(outgoing)
        found["sent"] += [buffer.nbytes for _, buffer in outgoing]
        return exchange(comm, outgoing, *rest)

    with (
        mock.patch.object(Chunk, "pack", packing),
        mock.patch.object(pairwise, "start_exchange", exchanging),
    ):
        yield found

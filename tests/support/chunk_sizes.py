"""How large the pieces are in which gradients are packed and sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from chainermn_comm.allreduce.buckets import Chunk
from chainermn_comm.allreduce.mpi_transport import MpiTransport


@contextmanager
def noted_sizes() -> Iterator[dict[str, list[int]]]:
    """Bytes of each chunk `packed` on this rank meanwhile, and of each message `sent`."""
    found: dict[str, list[int]] = {"packed": [], "sent": []}
    pack, exchange = Chunk.pack, MpiTransport._exchange

    def packing(self: Chunk, flats: Any, out: Any) -> None:
        found["packed"].append(self.nbytes)
        pack(self, flats, out)

    def exchanging(self: MpiTransport, outgoing: Any, incoming: Any) -> Any:
        found["sent"] += [shard.nbytes for shard in outgoing]
        return exchange(self, outgoing, incoming)

    with (
        mock.patch.object(Chunk, "pack", packing),
        mock.patch.object(MpiTransport, "_exchange", exchanging),
    ):
        yield found

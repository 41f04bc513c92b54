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
    pack, scatter = Chunk.pack, pairwise.start_reduce_scatter

    def packing(self: Chunk, flats: Any, out: Any) -> None:
        found["packed"].append(self.nbytes)
        pack(self, flats, out)

    def scattering(comm: Any, shards: Any, *rest: Any) -> Any:
        found["sent"] += [shard.nbytes for shard in shards]
        return scatter(comm, shards, *rest)

    with (
        mock.patch.object(Chunk, "pack", packing),
        mock.patch.object(pairwise, "start_reduce_scatter", scattering),
    ):
        yield found

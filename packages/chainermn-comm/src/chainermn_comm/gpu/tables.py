"""The tables that kernels walk, on the device: made once for addresses that loops repeat."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from .. import devices
from ..arithmetic import Chunk
from . import kernels

# A loop's gradients often lie where those of the step before lay, or alternate between few places.
# With `overlap` a step makes a call for each MiB of them. Most tables take some kilobytes.
KEPT = 1024


class Tables(NamedTuple):
    """The tables of one call, by chunk; the memory must live until kernels are done with them."""

    pack: list[Any]
    unpack: list[Any]
    host: np.ndarray  # pinned: what is copied to the device


class TableCache(OrderedDict[Any, Tables]):
    """Tables by the addresses that they hold, the latest used last."""

    def tables_of(
        self, chunks: Sequence[Chunk], inputs: Sequence[Any], flats: Sequence[Any], stream: Any
    ) -> Tables:
        """Return the tables of ``inputs`` to pack and ``flats`` to unpack, contiguous GPU arrays.

        Those that are new are copied to the device in the stream's order.
        """
        places = [[(devices.address(a), a.size, a.dtype) for a in each] for each in (inputs, flats)]
        key = (*map(tuple, places), *[chunk.dtype for chunk in chunks])
        if key in self:
            self.move_to_end(key)
            return self[key]
        rows = np.concatenate([kernels.segment_table(chunks, each) for each in (inputs, flats)])
        host, device = devices.pinned(rows.nbytes), devices.empty(rows.nbytes)
        host[...] = rows.reshape(-1).view(np.uint8)
        devices.copy_to_device(host, device, stream)
        lengths = [(len(chunk.segments) + 1) * kernels.ROW_BYTES for chunk in chunks]
        tables = [device[start:] for start in accumulate([0, *lengths, *lengths[:-1]])]
        while len(self) >= KEPT:
            self.popitem(last=False)  # calls keep what they use
        self[key] = Tables(tables[: len(chunks)], tables[len(chunks) :], host)
        return self[key]

"""The kernels on a real device."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import devices, kernels
from chainermn_comm.chunks import cut
from tests.support.kernel_double import cast

pytestmark = pytest.mark.gpu

# Sizes on both sides of a tile, no elements at all, and more tiles than blocks that run at once.
SIZES = (1, 0, kernels.TILE - 1, kernels.TILE, kernels.TILE + 1, 3_000_001)


@pytest.mark.parametrize("wire", ["float16", "float32", "float64"])
@pytest.mark.parametrize("chunk_bytes", [1 << 16, 1 << 30])
def test_pack_and_unpack_do_what_numpy_does(wire, chunk_bytes):
    rng = np.random.default_rng(0)
    arrays = [
        (rng.standard_normal(size) * 10.0 ** rng.integers(-9, 9, size)).astype(dtype)
        for size in SIZES
        for dtype in ("float32", "float64")
    ]
    arrays.append(rng.standard_normal(70_000).astype("float16"))
    grads = [devices.to_device(array) for array in arrays]
    wires = (np.dtype(wire),) * len(grads)
    keep = []
    for chunk in cut(tuple(array.size for array in arrays), wires, chunk_bytes):
        rows = kernels.rows([chunk], grads)
        table, buffer = devices.to_device(rows), devices.empty(chunk.nbytes)
        keep.append((table, buffer))
        kernels.launch("pack", table, chunk, buffer, 3)
        pieces = [cast(arrays[i][start:stop], wire, 3.0) for i, start, stop in chunk.parts]
        packed = np.concatenate(pieces)
        np.testing.assert_array_equal(devices.to_host(buffer).view(wire), packed)
        kernels.launch("unpack", table, chunk, buffer)
        for (index, start, stop), piece in zip(chunk.parts, pieces, strict=True):
            arrays[index][start:stop] = cast(piece, arrays[index].dtype)
    for grad, array in zip(grads, arrays, strict=True):
        np.testing.assert_array_equal(devices.to_host(grad), array)

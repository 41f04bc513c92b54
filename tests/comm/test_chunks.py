"""Chunks of gradients: each element in one of them, and back where it was."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from chainermn_comm.chunks import cut


@given(
    arrays=st.lists(st.tuples(st.integers(0, 40), st.sampled_from("efd")), max_size=12),
    chunk_bytes=st.integers(1, 200),
)
def test_chunks_cover_each_element_once(arrays, chunk_bytes):
    sizes = tuple(size for size, _ in arrays)
    dtypes = tuple(np.dtype(code) for _, code in arrays)
    found = cut(sizes, dtypes, chunk_bytes)
    elements = [(i, j) for c in found for i, start, stop in c.parts for j in range(start, stop)]
    assert sorted(elements) == [(i, j) for i, size in enumerate(sizes) for j in range(size)]
    for chunk in found:
        assert chunk.size == sum(stop - start for _, start, stop in chunk.parts) > 0
        assert chunk.nbytes <= max(chunk_bytes, chunk.dtype.itemsize)
        assert {dtypes[i] for i, _, _ in chunk.parts} == {chunk.dtype}
        alone = len(chunk.parts) == 1
        assert alone or all((start, stop) == (0, sizes[i]) for i, start, stop in chunk.parts)

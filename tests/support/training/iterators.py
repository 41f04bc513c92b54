"""The kinds of iterators that ranks share, and the communicators that they are tested with."""

from __future__ import annotations

import pytest
from chainer.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator


def serial(dataset, batch_size: int = 3, **options) -> SerialIterator:
    return SerialIterator(dataset, batch_size, **options)


def threads(dataset, batch_size: int = 3, **options) -> MultithreadIterator:
    return MultithreadIterator(dataset, batch_size, n_threads=2, **options)


def processes(dataset, batch_size: int = 3, **options) -> MultiprocessIterator:
    return MultiprocessIterator(dataset, batch_size, n_processes=1, **options)


# Not all pairs: what starts worker processes takes seconds.
every_kind = pytest.mark.parametrize(
    ("comm", "kind"),
    [
        pytest.param("naive", serial, marks=pytest.mark.ranks(2)),
        pytest.param("plain", serial, marks=pytest.mark.ranks(3)),
        pytest.param("naive", threads, marks=pytest.mark.ranks(3)),
        pytest.param("plain", processes, marks=pytest.mark.ranks(2)),
    ],
    indirect=["comm"],
)

"""Epochs as numbers of iterations that all ranks agree on."""

from __future__ import annotations

import pytest

from chainermn_comm import PeerError
from chainermn_train import get_epoch_trigger, get_n_iterations_for_one_epoch

pytestmark = pytest.mark.world


@pytest.mark.parametrize(
    ("length", "batch", "number"),
    [(0, 3, 0), (1, 100, 1), (5, 2, 3), (9, 3, 3), (100, 8, 13)],
)
def test_an_epoch_is_so_many_iterations_of_rank_0(comm, length, batch, number):
    """Those that Chainer 7 said; the last batch may be smaller."""
    dataset = range(length) if comm.rank == 0 else None
    batch += comm.rank
    assert get_n_iterations_for_one_epoch(dataset, batch, comm) == number
    expected = 2.5 * number, "iteration"
    assert get_epoch_trigger(2.5, dataset, batch, comm) == expected


@pytest.mark.parametrize(
    ("dataset", "batch", "error", "words"),
    [
        (range(5), 0, ValueError, "local_batch_size must be at least 1, not 0"),
        (range(5), "2", TypeError, "local_batch_size must be an integer, not '2'"),
        (None, 2, TypeError, "NoneType"),
    ],
)
def test_wrong_arguments_are_told_on_all_ranks(comm, dataset, batch, error, words):
    with pytest.raises(error if comm.rank == 0 else PeerError, match=words):
        get_n_iterations_for_one_epoch(dataset, batch, comm)

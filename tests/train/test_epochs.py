"""Epochs as numbers of iterations that all ranks agree on."""

from __future__ import annotations

import pytest

from chainermn_comm import PeerError
from chainermn_train import get_epoch_trigger, get_n_iterations_for_one_epoch

pytestmark = pytest.mark.world


@pytest.mark.parametrize(
    ("length", "batch", "number"),
    [
        (0, 3, 0),
        (1, 1, 1),
        (1, 100, 1),
        (5, 2, 3),
        (7, 8, 1),
        (9, 3, 3),
        (17, 3, 6),
        (100, 8, 13),
    ],
)
def test_an_epoch_is_so_many_iterations(comm, length, batch, number):
    """Those that Chainer 7 said; the last batch may be smaller."""
    assert get_n_iterations_for_one_epoch(range(length), batch, comm) == number
    assert get_epoch_trigger(10, range(length), batch, comm) == (
        10 * number,
        "iteration",
    )
    assert get_epoch_trigger(2.5, range(length), batch, comm) == (
        2.5 * number,
        "iteration",
    )


def test_rank_0s_part_and_batches_decide(comm):
    dataset = range(5) if comm.rank == 0 else None
    assert get_n_iterations_for_one_epoch(dataset, 2 + comm.rank, comm) == 3
    assert get_epoch_trigger(1 + comm.rank, dataset, 2, comm) == (
        3 * (1 + comm.rank),
        "iteration",
    )


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
    with pytest.raises(TypeError, match=r"get_n_iter.* communicator .*not str"):
        get_epoch_trigger(1, dataset, batch, "naive")

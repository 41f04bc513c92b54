"""What goes wrong with a checkpointer on one rank, and what it refuses, is told on all."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from unittest import mock

import pytest
from chainer.iterators import MultiprocessIterator

from chainermn_comm import PeerError
from chainermn_train import ResumableOrderSampler, create_multi_node_checkpointer
from tests.support.training.checkpoints import (
    files,
    files_of,
    link,
    loaded,
    make_checkpointer,
    make_trainer,
    save_and_flush,
    saved,
)

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]


def test_iterations_that_go_back(naive, folder):
    checkpointer = make_checkpointer(naive, folder)
    save_and_flush(checkpointer, 10)
    before = "iteration 9 would never be used.*maybe_load"
    for number, words in (9, before), (-1, "not negative"):
        with pytest.raises((ValueError, PeerError), match=words):
            checkpointer.save(link(1, 1), number)
    save_and_flush(checkpointer, 10, 5)  # again: it takes the place of the first
    assert files(naive, folder) == files_of(naive, "10-2")
    assert loaded(naive, folder) == [5, 5]
    del checkpointer
    with pytest.raises(ValueError, match=before):
        saved(naive, folder, 9)


@pytest.mark.sizes(2, 3, 4)
def test_arguments_that_differ_between_ranks(naive, folder):
    number = min(naive.rank, 1)
    make = create_multi_node_checkpointer
    checkpointer = make(f"run{number}", naive, path=folder)
    words = "disagree on name: run0 on rank 0; run1 on rank"
    with pytest.raises(ValueError, match=words):
        checkpointer.maybe_load(link(0, 0))
    with pytest.raises(ValueError, match=words):
        checkpointer.save(link(0, 0))
    with pytest.raises(ValueError, match=r"disagree on iteration: 10 .*; 11 "):
        make("run", naive, path=folder).save(link(1, 1), 10 + number)
    assert files(naive, folder) == set()


def test_wrong_arguments(naive, folder):
    for arguments, error, words in [
        ({"name": ""}, ValueError, "must not be empty"),
        ({"name": "a/b"}, ValueError, "a/b"),
        ({"name": "a\n"}, ValueError, "control"),
        ({"name": 3}, TypeError, "not int"),
        ({"comm": None}, TypeError, "create_communicator"),
        ({"cp_interval": 0}, ValueError, "cp_interval must be at least 1"),
        ({"gc_interval": 1.5}, TypeError, "gc_interval"),
        ({"path": 3}, TypeError, "int"),
    ]:
        with pytest.raises(error, match=words):
            create_multi_node_checkpointer(
                **{"name": "run", "comm": naive, **arguments}
            )
    with pytest.raises(TypeError, match="not int"):
        make_checkpointer(naive, folder).maybe_load(3)


def test_what_fails_on_one_rank_while_others_count_the_save_keeps_it(naive, folder):
    """Such as that there is no memory in the handshake itself, when the files are there."""
    handshake = naive.handshake
    is_last = naive.rank == naive.size - 1

    def fail_once_the_file_is_there(*arguments, **options):
        rows = handshake(*arguments, **options)
        if is_last and (folder / f"run.{naive.rank}.1").exists():
            raise MemoryError("planted")
        return rows

    planted = pytest.raises(MemoryError, match="planted")
    # The patch leaves nothing on the instance.
    if is_last:
        context = planted
    else:
        context = nullcontext()
    with (
        mock.patch.object(naive, "handshake", fail_once_the_file_is_there),
        context,
    ):
        make_checkpointer(naive, folder).save(link(1, 1), 1)
    assert loaded(naive, folder) == [1, 1]


def test_rank_that_fails_alone_waits_for_nobody(naive, folder):
    """As a trainer does it; the others may be anywhere, and its checkpoints must stay."""
    checkpointer = make_checkpointer(naive, folder, background=True)
    save_and_flush(checkpointer, 2)
    checkpointer.save(link(3, 3), 3)
    if naive.rank == 0:
        try:
            raise InterruptedError
        except InterruptedError:
            checkpointer.finalize()
        assert (folder / "run.0.3").exists()
    assert files_of(naive, 2) <= files(naive, folder)


@pytest.mark.parametrize(
    "order", [{"order_sampler": ResumableOrderSampler(1)}, {"shuffle": True}]
)
def test_shuffling_ahead_of_time_is_warned_of_once(naive, folder, order):
    trainer, *_ = make_trainer(
        naive, folder, iterate=lambda dataset: MultiprocessIterator(dataset, 4, **order)
    )
    checkpointer = make_checkpointer(naive, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for iteration in 1, 2:
            checkpointer.save(trainer.updater, iteration)
    said = ["ResumableOrderSampler" in str(each.message) for each in caught]
    assert sum(said) == (naive.rank == 0 and "shuffle" in order)

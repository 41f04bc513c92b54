"""What goes wrong with a checkpointer on one rank, and what it refuses, is told on all."""

from __future__ import annotations

import os
import threading
import warnings
from unittest import mock

import pytest
from chainer.iterators import MultiprocessIterator

from chainermn_train import ResumableOrderSampler, create_multi_node_checkpointer
from tests.support.training.checkpoints import (
    files,
    generation,
    link,
    loaded,
    make_checkpointer,
    make_trainer,
    save_and_flush,
    saved,
)

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]


def fail_after(patch, name):
    """Raise an error once the file of that name has got it."""
    real = os.replace

    def replace(source, target):
        real(source, target)
        if target.name == name:
            raise OSError(28, "No space left on device")

    patch.setattr(os, "replace", replace)


def test_iterations_that_differ_or_go_back(naive, folder):
    checkpointer = make_checkpointer(naive, folder)
    checkpointer.save(link(1, 1), 10)
    with pytest.raises(
        ValueError, match=r"iteration 9 would never be used.*maybe_load"
    ):
        checkpointer.save(link(1, 1), 9)
    saved(naive, folder / "before", 10)
    with pytest.raises(ValueError, match="call maybe_load"):
        saved(naive, folder / "before", 1)
    if naive.size > 1:
        with pytest.raises(ValueError, match=r"disagree on iteration: 11 .*; 12 "):
            checkpointer.save(link(1, 1), 11 + (naive.rank > 0))
    with pytest.raises((ValueError, RuntimeError), match="not negative"):
        checkpointer.save(link(1, 1), -1)
    checkpointer.save(link(5, 5), 10)  # again: it takes the place of the first
    checkpointer.flush()
    assert files(naive, folder) == generation(naive, "10-2") | {"before"}
    assert loaded(naive, folder) == [5, 5]


@pytest.mark.parametrize("background", [False, True])
def test_failed_rename_keeps_the_only_one_there_is(
    naive, folder, monkeypatch, background
):
    options = {"cp_interval": 1, "gc_interval": 1, "background": background}
    checkpointer = make_checkpointer(naive, folder, **options)
    save_and_flush(checkpointer, 5)
    with monkeypatch.context() as patch:
        fail_after(patch, f"run.{naive.size - 1}.5-2")
        with pytest.raises((OSError, RuntimeError), match="No space left"):
            save_and_flush(checkpointer, 5, 6)
    assert files(naive, folder) == generation(naive, 5)
    assert loaded(naive, folder) == [5, 5]
    save_and_flush(checkpointer, 5, 7)
    assert loaded(naive, folder) == [7, 7]


@pytest.mark.sizes(2, 3, 4)
def test_arguments_that_differ_between_ranks(naive, folder):
    name = f"run{min(naive.rank, 1)}"
    for call in "maybe_load", "save":
        checkpointer = create_multi_node_checkpointer(name, naive, path=folder)
        with pytest.raises(
            ValueError, match="disagree on name: run0 on rank 0; run1 on rank"
        ):
            getattr(checkpointer, call)(link(0, 0))
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


def test_a_save_after_one_that_failed_in_the_background_is_complete(
    naive, folder, monkeypatch
):
    checkpointer, failed = (
        make_checkpointer(naive, folder, background=True),
        threading.Event(),
    )
    save_and_flush(checkpointer, 1)
    naive.allgather_obj(None)

    def fail(*_):
        failed.set()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if naive.rank == naive.size - 1:
            patch.setattr(os, "fsync", fail)
        checkpointer.save(link(2, 2), 2)
        assert naive.rank < naive.size - 1 or failed.wait(60)
    with pytest.raises((OSError, RuntimeError), match="No space left"):
        checkpointer.save(link(3, 3), 3)
    assert not generation(naive, 2) & files(naive, folder)
    checkpointer.flush()
    assert loaded(naive, folder) == [3, 3]


def test_what_fails_on_one_rank_while_others_count_the_save_keeps_it(naive, folder):
    """Such as that there is no memory in the handshake itself."""
    last, calls, most = naive.size - 1, [], None

    def counted(operation, *args, **kwargs):
        rows = handshake(operation, *args, **kwargs)
        calls.append(operation)
        if len(calls) == most:
            raise MemoryError("planted")
        return rows

    handshake = naive.handshake
    # Which leaves nothing on the instance.
    with mock.patch.object(naive, "handshake", counted):
        make_checkpointer(naive, folder / "other").save(link(1, 1), 1)
        if naive.rank == last:  # by the last one all know that it is written
            most, calls[:] = len(calls), []
            with pytest.raises(MemoryError, match="planted"):
                make_checkpointer(naive, folder).save(link(1, 1), 1)
        else:
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
    assert generation(naive, 2) <= files(naive, folder)


@pytest.mark.parametrize("resumable", [False, True])
def test_shuffling_ahead_of_time_is_warned_of_once(naive, folder, resumable):
    order = (
        {"order_sampler": ResumableOrderSampler(1)} if resumable else {"shuffle": True}
    )
    trainer, *_ = make_trainer(
        naive, folder, iterate=lambda dataset: MultiprocessIterator(dataset, 4, **order)
    )
    checkpointer = make_checkpointer(naive, folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for iteration in 1, 2:
            checkpointer.save(trainer.updater, iteration)
    said = [
        str(each.message)
        for each in caught
        if "ResumableOrderSampler" in str(each.message)
    ]
    assert len(said) == (naive.rank == 0 and not resumable)

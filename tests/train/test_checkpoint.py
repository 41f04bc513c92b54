"""The checkpointer inside a Trainer: what it keeps, and what a resume gives back."""

from __future__ import annotations

import os
import random
import warnings

import chainer
import numpy as np
import pytest
from chainer import training

from chainermn_train import create_multi_node_checkpointer
from tests.support.checkpoints import (
    Noisy,
    bits,
    files,
    generation,
    make_trainer,
    rng,
    run_until,
)

# Nothing here can tell whether files have reached the disk, which takes most of the time.
pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]


@pytest.mark.parametrize("background", [False, True])
def test_resumed_training_ends_with_the_bits_of_uninterrupted_training(comm, folder, background):
    whole, expected, _ = make_trainer(comm, folder / "whole")
    whole.run()

    for begin, end in ((None, 5), (4, 7)):
        trainer, _, _ = make_trainer(comm, folder / "run")
        checkpointer = create_multi_node_checkpointer("run", comm, background=background)
        trainer.extend(checkpointer, trigger=(2, "iteration"))
        assert checkpointer.maybe_load(trainer) == (begin if not background or not begin else 2)
        run_until(trainer, end)

    trainer, model, optimizer = make_trainer(comm, folder / "run", seed=99)
    checkpointer = create_multi_node_checkpointer("run", comm, background=background)
    trainer.extend(checkpointer, trigger=(2, "iteration"))
    begin = checkpointer.maybe_load(trainer, optimizer)
    assert begin == trainer.updater.iteration == (4 if background else 6)
    random.seed(7)  # whatever is drawn before training begins
    np.random.seed(7)
    trainer.run()
    assert bits(model) == bits(expected)
    assert files(comm, folder / "run") == set()  # cleaned up after success
    assert [e["iteration"] for e in trainer.get_extension("LogReport").log] == [3, 6]


def test_iterator_with_a_generator_of_its_own(naive, folder):
    def sampler():
        return chainer.iterators.ShuffleOrderSampler(rng(5))

    whole, expected, _ = make_trainer(naive, folder / "whole", sampler=sampler())
    whole.run()
    for end in (3, None):
        trainer, model, _ = make_trainer(naive, folder / "run", sampler=sampler())
        checkpointer = create_multi_node_checkpointer("run", naive)
        trainer.extend(checkpointer, trigger=(1, "iteration"))
        assert checkpointer.maybe_load(trainer) == (None if end else 3)
        if end:
            run_until(trainer, end)
        else:
            trainer.run()
    assert bits(model) == bits(expected)


def test_keeps_cp_interval_and_collects_each_gc_interval(comm, folder):
    trainer, _, _ = make_trainer(comm, folder, stop=20)
    checkpointer = create_multi_node_checkpointer("run", comm, 2, 3)
    kept = []
    trainer.extend(checkpointer, trigger=(1, "iteration"))
    look = training.make_extension(priority=-300)(lambda _: kept.append(files(comm, folder)))
    trainer.extend(look, name="look")
    run_until(trainer, 9)
    expected = [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (4, 5), (4, 5, 6), (4, 5, 6, 7), (7, 8)]
    assert kept[:8] == [generation(comm, *each) for each in expected]


def test_each_rank_with_a_folder_of_its_own(comm, tmp_path):
    """As on nodes without a shared file system: only rank 0 has the records."""
    trainer, _, _ = make_trainer(comm, tmp_path)
    checkpointer = create_multi_node_checkpointer("run", comm)
    trainer.extend(checkpointer, trigger=(2, "iteration"))
    run_until(trainer, 5)
    names = {f"run.{comm.rank}.{iteration}" for iteration in (2, 4)}
    assert files(comm, tmp_path) == names | (
        {"run.commit.2", "run.commit.4"} if comm.rank == 0 else set()
    )
    comm.allgather_obj(None)
    if comm.rank == comm.size - 1:
        (tmp_path / f"run.{comm.rank}.4").unlink()
    resumed, _, _ = make_trainer(comm, tmp_path)
    checkpointer = create_multi_node_checkpointer("run", comm)
    assert checkpointer.maybe_load(resumed) == 2


def test_name_of_the_extension_is_not_that_of_the_run(naive, folder):
    trainer, _, _ = make_trainer(naive, folder)
    checkpointer = create_multi_node_checkpointer("run", naive)
    trainer.extend(checkpointer, name="checkpoints", trigger=(2, "iteration"))
    trainer.extend(checkpointer, name="checkpoints", trigger=(5, "iteration"))
    assert trainer.get_extension("checkpoints_1") is checkpointer
    run_until(trainer, 6)
    assert files(naive, folder) == generation(naive, 2, 4, 5, 6)


@pytest.mark.parametrize("background", [False, True])
def test_triggers_that_fire_at_once_save_once(naive, folder, monkeypatch, background):
    written = []
    real = os.replace

    def replace(source, target):
        written.append(target.name)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    trainer, _, _ = make_trainer(naive, folder)
    checkpointer = create_multi_node_checkpointer("run", naive, background=background)
    trainer.extend(checkpointer, trigger=(2, "iteration"))
    trainer.extend(checkpointer, name="again", trigger=(4, "iteration"))
    run_until(trainer, 5)
    assert written.count(f"run.{naive.rank}.4.new") == 1
    assert written.count(f"run.{naive.rank}.4") == (not background)  # else not committed yet


def test_success_within_an_except_block_still_cleans_up(naive, folder):
    try:
        raise LookupError
    except LookupError:
        trainer, _, _ = make_trainer(naive, folder)
        trainer.extend(create_multi_node_checkpointer("run", naive), trigger=(2, "iteration"))
        trainer.run()
    assert files(naive, folder) == set()


def test_model_can_be_taken_out_with_chainers_own_loader(naive, folder):
    trainer, model, _ = make_trainer(naive, folder)
    trainer.extend(create_multi_node_checkpointer("run", naive), trigger=(2, "iteration"))
    run_until(trainer, 4)
    alone = Noisy(50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chainer.serializers.load_npz(
            folder / f"run.{naive.rank}.4", alone, path="updater/model:main/"
        )
    assert bits(alone) == bits(model)

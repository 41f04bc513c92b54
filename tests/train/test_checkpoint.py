"""The checkpointer inside a Trainer: what it keeps, and what a resume gives back."""

from __future__ import annotations

import random

import numpy as np
import pytest
from chainer import training
from chainer.serializers import load_npz

from tests.support.training.checkpoints import (
    bits,
    files,
    generation,
    make_trainer,
    noisy,
    run_until,
)

# Nothing here can tell whether files have reached the disk, which takes most of the
# time.
pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]


@pytest.mark.parametrize("background", [False, True])
def test_interrupted_twice_it_ends_with_the_bits_of_an_uninterrupted_run(
    comm, folder, background
):
    whole, expected, _ = make_trainer(comm, folder / "whole", every=0)
    whole.run()
    options = {"background": background}
    for begin, end in ((None, 5), (4, 7)):
        trainer, _, checkpointer = make_trainer(comm, folder / "run", **options)
        assert checkpointer.maybe_load(trainer) == begin
        run_until(trainer, end)
    trainer, model, checkpointer = make_trainer(
        comm, folder / "run", seed=99, **options
    )
    begin = checkpointer.maybe_load(trainer, trainer.updater.get_optimizer("main"))
    assert begin == trainer.updater.iteration == 6
    random.seed(7)  # whatever is drawn before training begins
    np.random.seed(7)
    trainer.run()
    assert bits(model) == bits(expected)
    assert files(comm, folder / "run") == set()  # cleaned up after success
    if comm.rank == 0:
        log = trainer.get_extension("LogReport").log
        assert [each["iteration"] for each in log] == [4, 8]


def test_keeps_cp_interval_and_collects_each_gc_interval(comm, folder):
    options = {"cp_interval": 2, "gc_interval": 3}
    trainer, _, checkpointer = make_trainer(comm, folder, 20, every=1, **options)
    kept = []

    @training.make_extension(priority=-300)
    def look(_):
        checkpointer.flush()
        kept.append(files(comm, folder))

    trainer.extend(look, name="look")
    run_until(trainer, 9)
    expected = [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]
    expected += [(4, 5), (4, 5, 6), (4, 5, 6, 7), (7, 8)]
    assert kept[:8] == [generation(comm, *each) for each in expected]


def test_each_rank_with_a_folder_of_its_own(comm, tmp_path):
    """As on nodes without a shared file system."""
    trainer, *_ = make_trainer(comm, tmp_path)
    run_until(trainer, 5)
    assert files(comm, tmp_path) == {
        f"run.{comm.rank}.{iteration}" for iteration in (2, 4)
    }
    if comm.rank == comm.size - 1:
        (tmp_path / f"run.{comm.rank}.4").unlink()
    resumed, _, checkpointer = make_trainer(comm, tmp_path)
    assert checkpointer.maybe_load(resumed) == 2


def test_extension_may_have_any_name_and_chainers_own_loader_takes_the_model_out(
    naive, folder
):
    """Triggers that fire at once save once: there is no "6-2"."""
    trainer, model, checkpointer = make_trainer(naive, folder, every=0)
    for every in 2, 3:
        trainer.extend(checkpointer, name="checkpoints", trigger=(every, "iteration"))
    assert trainer.get_extension("checkpoints_1") is checkpointer
    run_until(trainer, 6)
    assert files(naive, folder) == generation(naive, 2, 3, 4, 6)
    alone = noisy(50)
    for rank in range(naive.size):  # each file has some of its arrays
        load_npz(
            folder / f"run.{rank}.6", alone, path="updater/model:main/", strict=False
        )
    assert bits(alone) == bits(model)


def test_by_default_its_name_is_the_run_s_and_it_saves_at_every_iteration(
    naive, folder
):
    """As in Chainer 7."""
    trainer, _, checkpointer = make_trainer(naive, folder, every=0)
    trainer.extend(checkpointer)
    assert trainer.get_extension("run") is checkpointer
    run_until(trainer, 3)
    assert files(naive, folder) == generation(naive, 1, 2, 3)


def test_statistics_are_of_what_was_saved(naive, folder, monkeypatch):
    trainer, _, checkpointer = make_trainer(naive, folder, every=0, path=folder)
    assert checkpointer.get_stats() == "no checkpoint has been saved"
    clock = iter([1.0, 2.0, 10.0, 13.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    checkpointer.save(trainer.updater)
    checkpointer.save(trainer.updater)  # which is saved already
    checkpointer.save(trainer.updater, 1)
    monkeypatch.undo()
    expected = "avg=2.000000, min=1.000000, max=3.000000"
    assert checkpointer.get_stats().endswith(": " + expected)


def test_success_within_an_except_block_still_cleans_up(naive, folder):
    try:
        raise LookupError
    except LookupError:
        make_trainer(naive, folder)[0].run()
    assert files(naive, folder) == set()

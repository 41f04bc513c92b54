"""The checkpointer inside a Trainer: what it keeps, and what a resume gives back."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
from chainer.serializers import load_npz

from tests.support.training.checkpoints import (
    bits,
    files,
    files_of,
    link,
    loaded,
    make_checkpointer,
    make_trainer,
    noisy,
    run_until,
    save_and_flush,
    saved,
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
    for begin, end in ((None, 5), (4, 7), (6, 8)):
        seed = comm.rank + (begin or 0)
        trainer, model, checkpointer = make_trainer(
            comm, folder / "run", seed=seed, background=background
        )
        assert checkpointer.maybe_load(trainer) == begin
        if end < 8:
            run_until(trainer, end)
    random.seed(7)  # whatever is drawn before training begins
    np.random.seed(7)
    trainer.run()
    assert bits(model) == bits(expected)
    assert files(comm, folder / "run") == set()  # cleaned up after success
    if comm.rank == 0:
        log = trainer.get_extension("LogReport").log
        assert [each["iteration"] for each in log] == [4, 8]


def test_keeps_cp_interval_and_collects_each_gc_interval(comm, folder):
    checkpointer = make_checkpointer(comm, folder, cp_interval=2, gc_interval=3)
    expected = [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]
    expected += [(4, 5), (4, 5, 6), (4, 5, 6, 7), (7, 8)]
    for iteration, kept in enumerate(expected, 1):
        save_and_flush(checkpointer, iteration)
        assert files(comm, folder) == files_of(comm, *kept)


def test_each_rank_with_a_folder_of_its_own(comm, tmp_path):
    """As on nodes without a shared file system."""
    saved(comm, tmp_path, 2, 4)
    assert files(comm, tmp_path) == {f"run.{comm.rank}.{each}" for each in (2, 4)}
    assert loaded(comm, tmp_path) == [4, comm.rank]
    if comm.rank == comm.size - 1:
        (tmp_path / f"run.{comm.rank}.4").unlink()
    assert loaded(comm, tmp_path) == [2, comm.rank]


def test_extension_has_the_run_s_name_or_any_and_chainers_loader_takes_the_model_out(
    naive, folder
):
    trainer, model, checkpointer = make_trainer(naive, folder, every=0)
    trainer.extend(checkpointer)  # as in Chainer 7, at each iteration
    trainer.extend(checkpointer, name="checkpoints", trigger=(3, "iteration"))
    assert trainer.get_extension("run") is checkpointer
    assert trainer.get_extension("checkpoints") is checkpointer
    run_until(trainer, 4)
    assert files(naive, folder) == files_of(naive, 1, 2, "3-2", 4)
    alone = noisy(50)
    for rank in range(naive.size):  # each file has some of its arrays
        load_npz(
            folder / f"run.{rank}.4", alone, path="updater/model:main/", strict=False
        )
    assert bits(alone) == bits(model)


def test_statistics_are_of_what_was_saved(naive, folder, monkeypatch):
    checkpointer = make_checkpointer(naive, folder)
    assert checkpointer.get_stats() == "no checkpoint has been saved"
    clock = iter([1.0, 2.0, 10.0, 13.0])
    with monkeypatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: next(clock))
        for value in 1, 2:
            checkpointer.save(link(value))
    words = "avg=2.000000, min=1.000000, max=3.000000"
    assert checkpointer.get_stats().endswith(f": {words}")


def test_success_within_an_except_block_still_cleans_up_the_newest_last(
    naive, folder, monkeypatch
):
    removed = []
    unlink = Path.unlink

    def record(path, **options):
        removed.append(path.name)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", record)
    try:
        raise LookupError
    except LookupError:
        make_trainer(naive, folder)[0].run()
    assert files(naive, folder) == set()
    own = [name for name in removed if re.fullmatch(rf"run\.{naive.rank}\.\d", name)]
    assert own == [f"run.{naive.rank}.{iteration}" for iteration in (2, 4, 6, 8)]

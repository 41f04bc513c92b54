"""Checkpoints that are damaged, lost, half written, or of something else."""

from __future__ import annotations

import re

import numpy as np
import pytest
from chainer.serializers import save_npz

from tests.support.oracles.raised import Awkward
from tests.support.training.checkpoints import (
    contents,
    files,
    files_of,
    link,
    loaded,
    make_checkpointer,
    on_rank_0,
    save_and_flush,
    saved,
)

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[int(position * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def make_a_folder(path):
    path.unlink()
    path.mkdir()


def swap(folder, iteration):
    first = folder / f"run.0.{iteration}"
    last = folder / f"run.1.{iteration}"
    first.rename(folder / "between")
    last.rename(first)
    (folder / "between").rename(last)


def call_later(folder):
    for path in folder.glob("run.*.30"):
        path.rename(f"{path}0")


def put_a_pickle_in(path):
    with np.load(path) as npz:
        arrays = dict(npz)
    arrays["values"] = np.array([Awkward()], dtype=object)
    with path.open("wb") as file:
        np.savez(file, **arrays)


def of_another_program(folder):
    """Such as those of ChainerMN 1.x, which Chainer's own `save_npz` makes."""
    for path in folder.glob("run.0.*"):
        with path.open("wb") as file:
            save_npz(file, link(1, 1))


def lose(folder, *iterations):
    """Those of a machine's own disk, say."""
    for iteration in iterations:
        (folder / f"run.1.{iteration}").unlink()


def truncated(folder):
    return (folder / "run.1.30").write_bytes(b"PK")


def emptied(folder):
    return (folder / "run.1.30").write_bytes(b"")


def first_byte(folder):
    return flip(folder / "run.1.30", 0)


def middle(folder):
    return flip(folder / "run.0.30", 0.5)


def swapped(folder):
    return [swap(folder, iteration) for iteration in (10, 20, 30)]


# What becomes of saves 10, 20 and 30, where a resume begins, and what is said. An error
# is raised where it begins nowhere.
CASES = {
    "nothing": (lambda _: None, 30, "^$"),
    "leftovers": (lambda folder: (folder / "run.0.40.tmp").touch(), 30, "^$"),
    "truncated": (
        truncated,
        20,
        r"'run': run\.\*\.30 is incomplete: run\.1\.30 .* goes on from 20$",
    ),
    "emptied": (emptied, 20, "run.1.30"),
    "first byte": (first_byte, 20, "run.1.30 is dam"),
    "middle": (middle, 20, "run.0.30 is damag"),
    "a folder": (lambda folder: make_a_folder(folder / "run.1.30"), 20, "run.1.30"),
    "lost": (lambda folder: lose(folder, 30), 20, r"those of ranks \[1\] are missing;"),
    "twice": (lambda folder: lose(folder, 30, 20), 10, r"30 is .*20 is .* from 10"),
    "renamed": (call_later, 20, r"run.1.300 is what rank 1 wrote at iteration 30 of"),
    "pickled": (
        lambda folder: put_a_pickle_in(folder / "run.1.30"),
        20,
        "allow_pickle=False",
    ),
    "swapped": (
        swapped,
        None,
        r"run\.1\.20 is what rank 0 wrote at iteration 20 of 'run'",
    ),
    "all lost": (
        lambda folder: lose(folder, 10, 20, 30),
        None,
        r"nothing of 'run' .*run\.\*\.30 is .*run\.\*\.10 is .* missing; restore the",
    ),
    "of another program": (of_another_program, None, "no file of a checkpoint of this"),
}


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_resume_takes_the_newest_that_is_whole_and_changes_nothing(
    naive, folder, capfd, name, elsewhere
):
    change, begin, words = CASES[name]
    saved(naive, folder, 10, 20, 30)
    on_rank_0(naive, lambda: change(folder))
    before = contents(naive, folder)
    target = link(0, 0)
    where = folder
    if elsewhere:
        where = folder / "new"
    checkpointer = make_checkpointer(naive, where)
    path = None
    if elsewhere:
        path = folder
    capfd.readouterr()
    if begin is None:
        with pytest.raises(RuntimeError, match=words):
            checkpointer.maybe_load(target, path=path)
    else:
        assert checkpointer.maybe_load(target, path=path) == begin
        assert target.values.tolist() == [begin, naive.rank]
        said = capfd.readouterr().err.strip()
        expected = words
        if naive.rank:
            expected = "^$"
        assert re.search(expected, said)
    assert contents(naive, folder) == before


def test_after_falling_back_the_run_saves_over_what_was_damaged(naive, folder):
    saved(naive, folder, 10, 20, 30)
    on_rank_0(naive, lambda: flip(folder / "run.0.30", 0.5))
    target = link(0, 0)
    checkpointer = make_checkpointer(naive, folder, cp_interval=1, gc_interval=2)
    assert checkpointer.maybe_load(target) == 20
    save_and_flush(checkpointer, 25)
    assert files(naive, folder) == files_of(naive, 25, 30)  # 10 and 20 were collected
    save_and_flush(checkpointer, 30)
    assert loaded(naive, folder) == [30, 30]
    assert files(naive, folder) == files_of(naive, 25, "30-2")
    checkpointer.finalize()
    assert files(naive, folder) == set()


@pytest.mark.sizes(2, 3, 4)
def test_a_first_save_that_was_killed_starts_at_0_and_is_replaced(naive, folder, capfd):
    """Leftovers go when a save begins; the files of others stay."""
    others = {
        "other.0.10",
        "run.0.10.bak",
        "run.x.1",
        "run2.0.1.tmp",
        "run.0.2.tmp.tmp",
    }
    leftovers = {f"run.{naive.size + 3}.20.tmp", "run.0.30.tmp", "run.1.20-2.tmp"}
    saved(naive, folder, 10)
    for name in others | leftovers:
        on_rank_0(naive, (folder / name).touch)
    on_rank_0(naive, lambda: lose(folder, 10))
    checkpointer = make_checkpointer(naive, folder)
    assert checkpointer.maybe_load(link(0, 0)) is None
    if naive.rank == 0:
        assert "; training goes on from 0" in capfd.readouterr().err
    checkpointer.save(link(1, 1), 10)
    save_and_flush(checkpointer, 20)
    assert files(naive, folder) == others | files_of(naive, "10-2", 20)
    checkpointer.finalize()
    assert files(naive, folder) == others


def test_files_of_several_saves_are_no_checkpoint(naive, folder):
    """Such as those that a machine brings back which a job went on without."""
    saved(naive, folder, 5, 10)
    saved(naive, folder / "other", 10)
    name = f"run.{naive.size - 1}.10"

    def swap_in():
        return (folder / "other" / name).replace(folder / name)

    on_rank_0(naive, swap_in)
    iteration = 5
    if naive.size == 1:
        iteration = 10
    assert loaded(naive, folder) == [iteration, naive.rank]


def test_another_model_or_precision_is_told_on_all_ranks(naive, folder):
    saved(naive, folder, 10)
    if naive.rank == 0:
        longer = link(1, 2, 3)
    else:
        longer = link(0, 0)
    half = link(0, 0)
    half.values = half.values.astype("f2")
    for other, words in [
        (longer, r"'values' has shape \(2,\)"),
        (half, "'values' has dtype float64 .* and float16 here"),
    ]:
        with pytest.raises((ValueError, RuntimeError), match=words):
            make_checkpointer(naive, folder).maybe_load(other)


def test_object_that_needs_pickle_is_refused_on_all_ranks(comm, folder):
    target = link(1, 2)
    if comm.rank == 0:
        target.add_persistent("strange", np.array([{1}, None]))
    checkpointer = make_checkpointer(comm, folder / "new")
    with pytest.raises((TypeError, RuntimeError), match=r"'strange'.*only pickle"):
        checkpointer.save(target)
    assert not (folder / "new").exists()
    with pytest.raises(TypeError, match="not int"):
        checkpointer.save(3)

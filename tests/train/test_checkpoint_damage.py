"""Checkpoints that are damaged, lost, half written, or of something else."""

from __future__ import annotations

import re
from pathlib import Path

import chainer
import numpy as np
import pytest

from tests.support.oracles.pickles import Awkward
from tests.support.training.checkpoints import (
    files,
    generation,
    link,
    loaded,
    make_checkpointer,
    on_rank_0,
    saved,
)

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]


def flip(path: Path, position: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(position * (len(data) - 1))] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "first byte": lambda path: flip(path, 0),
    "middle byte": lambda path: flip(path, 0.5),
    "deleted": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize(
    ("of", "how"), [*(("last", how) for how in DAMAGES), ("0", "middle byte")]
)
def test_damaged_newest_file_makes_the_resume_fall_back(naive, folder, capfd, of, how):
    saved(naive, folder, 10, 20, 30)
    of = str(naive.size - 1) if of == "last" else of
    on_rank_0(naive, lambda: DAMAGES[how](folder / f"run.{of}.30"))
    assert loaded(naive, folder) == [20, naive.rank]
    said = capfd.readouterr().err
    if naive.rank == 0 and (naive.size, how) != (1, "deleted"):
        words = rf"'run': run.\*.30 is incomplete: .*({of}\b).* goes on from 20"
        assert re.search(words, said)
    else:
        assert said == ""


def test_after_falling_back_the_run_saves_over_what_was_damaged(naive, folder):
    saved(naive, folder, 10, 20, 30)
    on_rank_0(naive, lambda: flip(folder / "run.0.30", 0.5))
    target = link(0, 0)
    checkpointer = make_checkpointer(naive, folder, cp_interval=1, gc_interval=2)
    assert checkpointer.maybe_load(target) == 20
    checkpointer.save(target, 25)
    checkpointer.flush()
    assert files(naive, folder) == generation(naive, 25, 30)  # 10 and 20 were collected
    checkpointer.save(target, 30)
    checkpointer.flush()
    assert loaded(naive, folder) == [20, naive.rank]
    assert files(naive, folder) == generation(naive, 25, "30-2")
    checkpointer.finalize()
    assert files(naive, folder) == set()


def damage_all(folder):
    flip(folder / "run.0.10", 0.5)
    DAMAGES["truncated"](folder / "run.0.20")
    return r"nothing of 'run' .* is complete: run\.\*\.20 is.*run\.\*\.10 is"


def lose_all(folder):
    """Those of a machine's own disk, say; a first save that was killed leaves one iteration."""
    for path in folder.glob("run.1.*"):
        path.unlink()
    return r"run\.\*\.10 is incomplete: of . files those of ranks 1 are missing; mend"


def of_another_program(folder):
    """Such as those of ChainerMN 1.x, which Chainer's own `save_npz` makes."""
    for path in folder.glob("run.0.*"):
        with path.open("wb") as file:
            chainer.serializers.save_npz(file, link(1, 1))
    return r"run.0.20 is damaged, or no file of a checkpoint of this version"


def swap(folder):
    for iteration in 10, 20:
        first, last = folder / f"run.0.{iteration}", folder / f"run.1.{iteration}"
        first.rename(folder / "between")
        last.rename(first)
        (folder / "between").rename(last)
    return r"run\.1\.20 is what rank 0 wrote at iteration 20 of 'run'"


def call_later(folder):
    for path in folder.glob("run.*.*"):
        path.rename(f"{path}0")
    return r"run\.1\.200 is what rank 1 wrote at iteration 20 of 'run'"


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    "change", [damage_all, lose_all, of_another_program, swap, call_later]
)
def test_files_that_can_not_be_used_are_no_reason_to_start_again(naive, folder, change):
    saved(naive, folder, 10, 20)
    words: list[str] = []
    on_rank_0(naive, lambda: words.append(change(folder)))
    before = files(naive, folder)
    with pytest.raises(RuntimeError, match=naive.bcast_obj(words)[0]):
        loaded(naive, folder)
    assert files(naive, folder) == before


@pytest.mark.sizes(2, 3, 4)
def test_a_first_save_that_was_killed_starts_at_0_and_is_replaced(naive, folder, capfd):
    others = {"other.0.10", "run.0.10.bak", "run.x.1", "run2.0.1.tmp"}
    for name in others:
        on_rank_0(naive, (folder / name).touch)
    saved(naive, folder, 10)
    on_rank_0(naive, (folder / "run.1.10").unlink)
    on_rank_0(naive, (folder / f"run.{naive.size + 3}.20.tmp").touch)
    target, checkpointer = link(0, 0), make_checkpointer(naive, folder)
    assert checkpointer.maybe_load(target) is None
    if naive.rank == 0:
        assert "; training goes on from 0" in capfd.readouterr().err
    checkpointer.save(target, 10)
    checkpointer.save(target, 20)
    checkpointer.flush()
    assert files(naive, folder) == others | generation(naive, "10-2", 20)
    assert loaded(naive, folder) == [0, 0]


def test_files_of_several_saves_are_no_checkpoint(naive, folder):
    """Such as those that a machine brings back which a job went on without."""
    saved(naive, folder / "one", 10)
    saved(naive, folder / "other", 10)
    saved(naive, folder, 5)
    for place in "one", "other":
        path = folder / place / f"run.{naive.rank}.10"
        if (naive.rank == naive.size - 1) == (place == "one"):
            (folder / path.name).write_bytes(path.read_bytes())
    naive.allgather_obj(None)
    assert loaded(naive, folder) == [10 if naive.size == 1 else 5, naive.rank]


def test_another_model_or_precision_is_told_on_all_ranks(naive, folder):
    saved(naive, folder, 10)
    longer = link(1, 2, 3) if naive.rank == 0 else link(0, 0)
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
    assert not (folder / "new").exists() or files(comm, folder / "new") == set()
    fits = link(1, 2)
    fits.add_persistent("other_order", np.ones(2, ">f4"))
    checkpointer.save(fits)
    with pytest.raises(TypeError, match="not int"):
        checkpointer.save(3)


def test_pickle_in_a_file_is_not_loaded(naive, folder):
    saved(naive, folder, 1)
    path = folder / f"run.{naive.rank}.1"
    with np.load(path) as npz:
        arrays = dict(npz)
    trap = {
        name: np.array([Awkward()], dtype=object) for name in arrays if "values" in name
    }
    with path.open("wb") as file:
        np.savez(file, **{**arrays, **trap})
    naive.allgather_obj(None)
    with pytest.raises(RuntimeError, match="allow_pickle=False"):
        loaded(naive, folder)

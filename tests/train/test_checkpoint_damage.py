"""Checkpoints that are damaged, lost, half written, or of something else."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from pathlib import Path

import chainer
import numpy as np
import pytest

from tests.support.checkpoints import (
    files,
    generation,
    link,
    loaded,
    make_checkpointer,
    on_rank_0,
    save_and_flush,
    saved,
)
from tests.support.crashes import crashes
from tests.support.pickles import Awkward

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
    "last byte": lambda path: flip(path, 1),
    "deleted": lambda path: path.unlink(),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize(
    ("of", "how"), [*itertools.product(["last", "commit"], DAMAGES), ("0", "middle byte")]
)
def test_damaged_newest_file_makes_the_resume_fall_back(naive, folder, capfd, of, how):
    saved(naive, folder, 10, 20, 30)
    of = str(naive.size - 1) if of == "last" else of
    on_rank_0(naive, lambda: DAMAGES[how](folder / f"run.{of}.30"))
    assert loaded(naive, folder) == [20, naive.rank]
    said = capfd.readouterr().err
    if naive.rank == 0:
        words = r"'run': iteration 30 skipped: .* training goes on from iteration 20"
        assert re.search(words, said)
        missing = f"run.commit.30 is {'missing' if how == 'deleted' else 'damaged'}"
        assert (missing if of == "commit" else f"rank {of}: run.{of}.30 ") in said
    else:
        assert said == ""


def test_after_falling_back_the_run_saves_over_what_was_damaged(naive, folder):
    saved(naive, folder, 10, 20, 30)
    on_rank_0(naive, lambda: (folder / "run.0.30").write_bytes(b""))
    target = link(0, 0)
    checkpointer = make_checkpointer(naive, folder, cp_interval=1, gc_interval=2)
    assert checkpointer.maybe_load(target) == 20
    checkpointer.save(target, 25)
    assert files(naive, folder) == generation(naive, 25, 30)  # 10 and 20 were collected
    checkpointer.save(target, 30)
    assert loaded(naive, folder) == [20, naive.rank]
    naive.allgather_obj(None)
    with crashes(folder) as states:
        checkpointer.finalize()
    found = [{name for name, _ in state} for state in states]
    assert not any("run.commit.25" in each and "run.commit.30" not in each for each in found)
    assert files(naive, folder) == set()


def raises_and_removes_nothing(comm, folder, words):
    before = files(comm, folder)
    with pytest.raises(RuntimeError, match=words):
        loaded(comm, folder)
    assert files(comm, folder) == before


def test_everything_damaged_raises_and_removes_nothing(naive, folder):
    saved(naive, folder, 10, 20)
    on_rank_0(naive, lambda: flip(folder / "run.0.10", 0.5))
    on_rank_0(naive, lambda: (folder / "run.commit.20").unlink())
    words = r"iteration 20 skipped.*iteration 10 skipped: rank 0"
    raises_and_removes_nothing(naive, folder, words)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("iterations", [(10,), (10, 20)])
def test_lost_records_are_no_reason_to_start_again(naive, folder, background, iterations):
    """Also where it is the only one: a first save that was killed leaves other names."""
    checkpointer = make_checkpointer(naive, folder, background=background)
    for iteration in iterations:
        save_and_flush(checkpointer, iteration)
    on_rank_0(naive, lambda: [path.unlink() for path in folder.glob("run.commit.*")])
    words = r"iteration 10 skipped: the manifest run\.commit\.10 is missing; mend the files"
    raises_and_removes_nothing(naive, folder, words)


def test_files_of_a_lost_record_stay_until_they_are_replaced_or_old(naive, folder):
    saved(naive, folder, 10, 20, 30)
    on_rank_0(naive, lambda: (folder / "run.commit.30").unlink())
    lost = generation(naive, 30) - {"run.commit.30"}
    for iteration, begin in (25, 20), (28, 25):
        checkpointer = make_checkpointer(naive, folder)
        assert checkpointer.maybe_load(link(0, 0)) == begin
        save_and_flush(checkpointer, iteration)
        assert lost <= files(naive, folder)
    del checkpointer  # which would keep others from saving
    expected = generation(naive, 10, 20, 25, 28, 30)
    save_and_flush(make_checkpointer(naive, folder), 30, 5)
    assert files(naive, folder) == expected
    assert loaded(naive, folder) == [5, 5]
    on_rank_0(naive, lambda: (folder / "run.commit.20").unlink())
    assert loaded(naive, folder) == [5, 5]
    assert files(naive, folder) == expected - generation(naive, 20)


def test_never_committed_starts_at_0_and_is_swept(naive, folder, capfd):
    others = {"other.0.10", "run.0.10.bak", "run.x.1", "run2.0.1.tmp"}
    half = {"run.commit.10.tmp", f"run.{naive.size + 3}.20.new.tmp", "run.0.20.new"}
    whole = {f"run.{rank}.10.new" for rank in (*range(naive.size), 7)}
    for name in others | half | whole:
        on_rank_0(naive, (folder / name).touch)
    assert loaded(naive, folder) == [0, 0]
    assert files(naive, folder) == others
    if naive.rank == 0:
        assert "10 skipped: it was never committed" in (said := capfd.readouterr().err)
        assert "goes on from iteration 0" in said


def test_files_of_others_that_have_the_same_name_stay(naive, folder, capfd):
    """Such as those of ChainerMN 1.x, which Chainer's own `save_npz` makes."""
    for iteration in (100, 200, 300):
        with (folder / f"run.{naive.rank}.{iteration}").open("wb") as file:
            chainer.serializers.save_npz(file, link(1, 1))
    on_rank_0(naive, lambda: (folder / "run.0.400").write_text("precious"))
    before = files(naive, folder)
    assert loaded(naive, folder) == [0, 0]
    assert files(naive, folder) == before
    said = capfd.readouterr().err
    assert ("run.0.400" in said and "not touched" in said) == (naive.rank == 0)
    save_and_flush(make_checkpointer(naive, folder), 350)
    assert loaded(naive, folder) == [350, 350]
    assert files(naive, folder) == before | generation(naive, 350)


@pytest.mark.sizes(2, 3, 4)
def test_another_number_of_ranks_is_told(naive, folder):
    half = naive.split(naive.rank % 2, naive.rank)
    if naive.rank % 2 == 0:
        saved(half, folder, 10)
    naive.allgather_obj(None)
    words = rf"iteration 10 was written by {(naive.size + 1) // 2} ranks, this job has {naive.size}"
    with pytest.raises(RuntimeError, match=words):
        loaded(naive, folder)
    half.finalize()


def test_another_model_or_precision_is_told_on_all_ranks(naive, folder):
    saved(naive, folder, 10)
    longer, more, half = link(1, 2, 3) if naive.rank == 0 else link(0, 0), link(0, 0), link(0, 0)
    more.add_persistent("more", 1)
    half.values = half.values.astype("f2")
    for other, words in [
        (longer, r"'values' has shape \(2,\)"),
        (more, r"lacks.*more.*made differently"),
        (half, "'values' has dtype float64 .* and float16 here"),
    ]:
        error = (ValueError, RuntimeError) if other is longer else ValueError
        with pytest.raises(error, match=words):
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
    """Even where somebody forges a manifest."""
    saved(naive, folder, 1)
    path, manifest = folder / f"run.{naive.rank}.1", folder / "run.commit.1"
    trap = np.array([Awkward()], dtype=object)
    with path.open("wb") as file:
        np.savez(file, values=trap, nothing=trap, text=trap)

    def sha256(data):
        return hashlib.sha256(data).hexdigest()

    files = naive.allgather_obj({"size": path.stat().st_size, "sha256": sha256(path.read_bytes())})
    body = {**json.loads(manifest.read_text())["record"], "files": files}
    whole = {"record": body, "sha256": sha256(json.dumps(body).encode())}
    on_rank_0(naive, lambda: manifest.write_text(json.dumps(whole, indent=1) + "\n"))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        loaded(naive, folder)

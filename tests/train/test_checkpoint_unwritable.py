"""Where checkpoints and snapshots can't be written, all ranks learn the file and what to do."""

from __future__ import annotations

import builtins
import errno
import os
import re
import resource
from types import SimpleNamespace

import pytest
from chainer.training import extensions
from numpy.random import default_rng

from chainermn_train import multi_node_snapshot
from tests.support.oracles.raised import raises_on_all
from tests.support.training.checkpoints import (
    files,
    files_of,
    link,
    loaded,
    make_checkpointer,
    save_and_flush,
)

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("unsynced")]

# More than what Python buffers of a file, and nothing to compress.
LARGE = default_rng(0).random(60_000)


def checkpoints(comm, folder, background=False):
    """A function that saves a checkpoint at an iteration, in place of the one before."""
    checkpointer = make_checkpointer(
        comm, folder, cp_interval=1, gc_interval=1, background=background
    )

    def save(iteration):
        checkpointer.save(link(iteration, comm.rank, *LARGE), iteration)
        checkpointer.flush()

    return save


def snapshots(comm, folder):
    """A function that takes a snapshot of each rank."""
    taken = extensions.snapshot(target=link(*LARGE), filename="run")
    snapshot = multi_node_snapshot(comm, taken, range(comm.size))
    trainer = SimpleNamespace(out=str(folder))
    return lambda _: snapshot(trainer)


KINDS = {
    "checkpoints": checkpoints,
    "in the background": lambda *args: checkpoints(*args, background=True),
    "snapshots": snapshots,
}


def fail(patch, name, code, text="run"):
    """Let a function fail where it is about such a file; only `open` names the file."""
    module = os
    if name == "open":
        module = builtins
    real = getattr(module, name)

    def failing(*args, **kwargs):
        if name == "fsync" or text in str(args[0]):
            path = []
            if name == "open":
                path = [os.fspath(args[0])]
            raise OSError(code, os.strerror(code), *path)
        return real(*args, **kwargs)

    patch.setattr(module, name, failing)


def assert_told(comm, folder, save, text):
    """A save fails on all ranks: because of the last, whose file in the folder they learn."""
    rank = comm.size - 1
    with raises_on_all(comm.rank == rank, OSError) as caught:
        save(2)
    told = str(caught.value)
    there = comm.bcast_obj(str(folder), root=rank)
    place = re.escape(os.path.realpath(there))
    remedy = (
        f"make room in {place}, let this user write there, or save in another folder"
    )
    assert re.search(rf"{text}; {remedy}: '{place}/run\.", told), told
    assert comm.rank == rank or f"rank {rank}" in told


@pytest.mark.parametrize("kind", ["checkpoints", "in the background"])
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("open", errno.EACCES),
        ("fsync", errno.ENOSPC),
        ("fsync", errno.EDQUOT),
        ("replace", errno.EROFS),
    ],
)
def test_a_file_that_cannot_be_written_is_named(
    naive, folder, monkeypatch, kind, name, code
):
    """And the only checkpoint that there is stays, until a save succeeds."""
    save = KINDS[kind](naive, folder)
    save(1)
    with monkeypatch.context() as patch:
        if naive.rank == naive.size - 1:
            fail(patch, name, code)
        assert_told(naive, folder, save, os.strerror(code))
    for iteration in 1, 3:
        assert files(naive, folder) == files_of(naive, iteration)
        target = link(0, 0, *LARGE)
        assert make_checkpointer(naive, folder).maybe_load(target) == iteration
        assert target.values[:2].tolist() == [iteration, naive.rank]
        save(3)


def test_a_save_after_one_that_failed_in_the_background_is_complete(
    naive, folder, monkeypatch
):
    checkpointer = make_checkpointer(naive, folder, background=True)
    save_and_flush(checkpointer, 1)
    is_last = naive.rank == naive.size - 1
    if is_last:
        fail(monkeypatch, "replace", errno.ENOSPC, ".2.tmp")
    checkpointer.save(link(2, 2), 2)
    with raises_on_all(is_last, OSError, "No space left"):
        checkpointer.save(link(3, 3), 3)
    checkpointer.flush()
    assert files(naive, folder) == files_of(naive, 1, 3)
    assert loaded(naive, folder) == [3, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_is_full_midway_is_told(naive, tmp_path, kind):
    """A real one: what is in the buffer can't be written when the file is closed, either."""
    save = KINDS[kind](naive, tmp_path)
    save(1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if naive.rank == naive.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE.nbytes // 2, limits[1]))
    try:
        assert_told(naive, tmp_path, save, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.glob("*.tmp"))
    save(3)


def test_a_folder_that_cannot_be_made_is_named(naive, tmp_path, monkeypatch):
    save = checkpoints(naive, tmp_path / "run.folder" / "run.own")
    with monkeypatch.context() as patch:
        if naive.rank == naive.size - 1:
            fail(patch, "mkdir", errno.EROFS)
        assert_told(naive, tmp_path / "run.folder", save, "Read-only file system")
    save(3)

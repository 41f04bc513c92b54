"""Snapshots of a training run, one for each rank, from which it goes on as if never ended."""

from __future__ import annotations

import functools
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from chainer.training import extensions
from mistakes import stop_if

CHECKPOINTS = "mnist"  # what they are called
# Weights don't get smaller by compression, which took most of an epoch's time.
save_npz = functools.partial(chainer.serializers.save_npz, compression=False)


def snapshot(comm: Any) -> Any:
    """The extension that writes this rank's snapshot after each epoch.

    Ranks hold different examples, so each keeps its own snapshot. It keeps two: a job killed
    while they are written leaves some ranks without the last one.
    """
    return extensions.snapshot(
        savefun=save_npz, filename=_prefix(comm) + "{.updater.epoch}.npz", n_retains=2
    )


def shuffled_by_its_past(order: np.ndarray, _position: int) -> np.ndarray:
    """The order of the next epoch, drawn from this one's.

    A snapshot holds the order, but not the state of NumPy's generator: so a resumed run
    sees the same batches as one that was never interrupted.
    """
    return np.random.RandomState(order).permutation(order)


def _prefix(comm: Any) -> str:
    """What this rank's snapshots are called, up to the epoch."""
    return f"snapshot_rank{comm.rank}of{comm.size}_epoch"


def _epochs(folder: str, comm: Any) -> set[int]:
    """The epochs after which this rank left a snapshot in the folder."""
    names = (re.fullmatch(_prefix(comm) + r"(\d+)\.npz", f) for f in os.listdir(folder))
    return {int(name[1]) for name in names if name}


def _path(folder: str, comm: Any, epoch: int) -> str:
    return os.path.join(folder, f"{_prefix(comm)}{epoch}.npz")


def remove_earlier(folder: str, comm: Any) -> None:
    """Remove snapshots and checkpoints of an earlier run, lest a resume mixes the two runs."""
    for epoch in _epochs(folder, comm):
        os.remove(_path(folder, comm, epoch))
    for path in Path(folder).glob(f"{CHECKPOINTS}.*.[0-9]*"):
        path.unlink(missing_ok=True)  # other ranks may do so, too


def resume(trainer: Any, folder: str, comm: Any) -> None:
    """Load the newest snapshots that are whole on all ranks (collective)."""
    mine, problem = dict[int, str | None](), None
    try:
        mine = {epoch: _damage(_path(folder, comm, epoch)) for epoch in _epochs(folder, comm)}
    except OSError as error:
        problem = f"--resume {folder}: cannot read the folder: {error.strerror}"
    stop_if(comm, problem)

    epoch, skipped = _newest_whole(comm.allgather_obj(mine))
    if epoch is None:
        problem = (
            f"--resume {folder}: holds no snapshot that all {comm.size} rank(s) share; "
            "a run is resumed from the folder it wrote to, with as many ranks as before"
            + "".join(f"; {why}" for why in skipped)
        )
    elif epoch >= trainer.stop_trigger.get_training_length()[0]:
        problem = f"--resume {folder}: has {epoch} epochs already; ask for more: --epoch"
    stop_if(comm, problem)
    assert epoch is not None
    if comm.rank == 0:
        for why in skipped:
            print(f"train_mnist.py: --resume {folder}: {why}", file=sys.stderr, flush=True)

    path = _path(folder, comm, epoch)
    try:
        chainer.serializers.load_npz(path, trainer)
    except Exception as error:  # another model or data set
        problem = f"--resume: {path} does not fit this run: {error}"
    stop_if(comm, problem)


def _damage(path: str) -> str | None:
    """Why the snapshot can't be read; None when it is whole."""
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except Exception as error:  # a damaged file may lead zipfile to raise anything
        return f"{os.path.basename(path)} is damaged: {error}"
    return None if damaged is None else f"{os.path.basename(path)} is damaged: {damaged}"


def _newest_whole(damages: list[dict[int, str | None]]) -> tuple[int | None, list[str]]:
    """The newest epoch of which every rank has a whole snapshot, and why later ones don't serve.

    Args:
        damages: of each rank, epochs and what `_damage` says of their snapshots.
    """
    skipped: list[str] = []
    for epoch in sorted(set().union(*damages), reverse=True):
        views = [damage.get(epoch, "has none") for damage in damages]
        bad = [f"rank {rank}: {view}" for rank, view in enumerate(views) if view is not None]
        if not bad:
            return epoch, skipped
        skipped.append(f"snapshot of epoch {epoch} skipped: {', '.join(bad)}")
    return None, skipped

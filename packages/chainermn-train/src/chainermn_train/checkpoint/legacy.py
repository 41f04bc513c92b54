"""Checkpoints of version 2.0: a file a rank with all of its state, and a manifest of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from functools import partial
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked, raise_on_all_ranks
from .shards import State
from .store import OPERATION, Folder

_NONE = "chainermn-file/none"  # the names that have the value None


def read_legacy(
    comm: CommunicatorBase, folder: Folder
) -> tuple[int | None, list[State]]:
    """Return the iteration and all ranks' states of the newest checkpoint of 2.0 (collective).

    Where this number of ranks has saved it, each gets its own alone. The iteration is
    None where there is no such checkpoint; RuntimeError is raised if none of those that
    there are is whole.
    """
    manifests = allgather_checked(comm, OPERATION, lambda: _manifests(comm, folder))[0]
    for iteration, digests in sorted(manifests.items(), reverse=True):
        found: dict[int, State] = {}
        read = partial(_read_all, folder, comm, iteration, digests, found)
        if all(allgather_checked(comm, OPERATION, read)):
            if len(digests) == comm.size:
                return iteration, [found[comm.rank]] * comm.size
            ranks = range(len(digests))
            return iteration, [
                comm.bcast_obj(found.get(it), root=it % comm.size) for it in ranks
            ]
    if manifests:
        raise RuntimeError(
            f"rank {comm.rank}: no checkpoint of version 2.0 of {folder.name!r} in {folder.path} "
            "is complete; mend the files, or remove them to start at 0"
        )
    return None, []


def remove_legacy(comm: CommunicatorBase, folder: Folder) -> None:
    """Remove all checkpoints of 2.0 (collective)."""
    manifests = allgather_checked(comm, OPERATION, lambda: _manifests(comm, folder))[0]
    with raise_on_all_ranks(comm, OPERATION):
        for iteration, digests in manifests.items():
            for rank in ["commit", *range(len(digests))]:
                (folder.path / f"{folder.name}.{rank}.{iteration}").unlink(
                    missing_ok=True
                )


def _manifests(comm: CommunicatorBase, folder: Folder) -> dict[int, list[Any]]:
    """Return the checksums of the ranks' files by iteration; they are in rank 0's folder."""
    pattern, found = re.compile(rf"{re.escape(folder.name)}\.commit\.(\d+)", re.A), {}
    if comm.rank == 0 and folder.path.is_dir():
        for path in folder.path.iterdir():
            if match := pattern.fullmatch(path.name):
                try:
                    record = json.loads(path.read_bytes())["record"]
                    found[int(match[1])] = [each["sha256"] for each in record["files"]]
                except (OSError, ValueError, TypeError, KeyError):
                    continue  # damaged: an older one may do
    return found


def _read_all(
    folder: Folder,
    comm: CommunicatorBase,
    iteration: int,
    digests: list[Any],
    found: Any,
) -> bool:
    """Fill ``found`` with the states that this rank reads; return whether all are whole."""
    ranks = range(comm.rank, len(digests), comm.size)
    found.update(
        {rank: _read(folder, rank, iteration, digests[rank]) for rank in ranks}
    )
    return None not in found.values()


def _read(folder: Folder, rank: int, iteration: int, digest: str) -> State | None:
    """Return what a rank's file holds; None if it isn't whole."""
    base = folder.path / f"{folder.name}.{rank}.{iteration}"
    # Which may not have got its name yet.
    for path in base, base.with_name(base.name + ".new"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                file.seek(0)
                state: State = dict(np.load(file, allow_pickle=False))
                return state | dict.fromkeys(np.asarray(state.pop(_NONE)).tolist())
    return None

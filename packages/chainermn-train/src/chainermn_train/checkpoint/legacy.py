"""Checkpoints of version 2.0: a file a rank with all of its state, and a manifest of them."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked
from .shards import State
from .store import OPERATION, Folder

_NONE = "chainermn-file/none"  # the names that have the value None


def read_legacy(comm: CommunicatorBase, folder: Folder) -> tuple[int | None, list[State]]:
    """Return the iteration and the states of the newest checkpoint of 2.0 (collective).

    It is whole and of as many ranks; a rank gets its own state alone. The iteration is None where
    there is no such checkpoint.
    """
    manifests = allgather_checked(comm, OPERATION, lambda: _manifests(comm, folder))[0]
    for iteration, digests in sorted(manifests.items(), reverse=True):
        states: list[State] = []

        def read(iteration: int = iteration, digests: list[Any] = digests) -> bool:
            return _read(folder, comm.rank, iteration, digests[comm.rank], states)  # noqa: B023

        if len(digests) == comm.size and all(allgather_checked(comm, OPERATION, read)):
            return iteration, [states[0]] * comm.size
    return None, []


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


def _read(folder: Folder, rank: int, iteration: int, digest: str, states: list[State]) -> bool:
    base = folder.path / f"{folder.name}.{rank}.{iteration}"
    for path in base, base.with_name(base.name + ".new"):  # which may not have got its name yet
        try:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    continue
                file.seek(0)
                state: State = dict(np.load(file, allow_pickle=False))
        except OSError:
            continue
        state.update(dict.fromkeys(np.asarray(state.pop(_NONE)).tolist()))
        states.append(state)
        return True
    return False

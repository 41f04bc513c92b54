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
        state: State = {}
        if len(digests) == comm.size:
            read = partial(_read, folder, comm.rank, iteration, digests[comm.rank], state)
            if all(allgather_checked(comm, OPERATION, read)):
                return iteration, [state] * comm.size
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


def _read(folder: Folder, rank: int, iteration: int, digest: str, state: State) -> bool:
    """Fill ``state`` from a rank's file; return whether it is whole."""
    base = folder.path / f"{folder.name}.{rank}.{iteration}"
    for path in base, base.with_name(base.name + ".new"):  # which may not have got its name yet
        with contextlib.suppress(OSError), path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == digest:
                file.seek(0)
                state.update(np.load(file, allow_pickle=False))
                state.update(dict.fromkeys(np.asarray(state.pop(_NONE)).tolist()))
                return True
    return False

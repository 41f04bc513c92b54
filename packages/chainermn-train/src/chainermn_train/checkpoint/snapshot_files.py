"""The files of snapshots that several ranks share."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from .state_dict import RESERVED_PREFIX, StateError, open_state

# int64 of shape (4,): replica set, sets that were named, ranks, and arrays in the file, this one
# included.
TAKEN_BY = RESERVED_PREFIX + "taken_by"


def find(folder: Path, name: str, suffix: str) -> list[str]:
    """Return a set's snapshots without their suffix, oldest first; remove what killed jobs left."""
    if not folder.is_dir():
        return []
    # The place of the iteration is in braces.
    before, after = name.split("{")[0], name.split("}")[-1] if "{" in name else ""
    for path in folder.glob("tmp*"):  # in which Chainer's writers left half a snapshot
        if before and path.name.startswith("tmp" + before) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    pattern = re.compile(re.escape(before) + ".*" + re.escape(after + suffix))
    paths = [folder / each for each in os.listdir(folder) if pattern.fullmatch(each)]
    paths.sort(key=lambda path: (path.stat().st_mtime_ns, path.name))
    return [path.name.removesuffix(suffix) for path in paths]


def read(path: Path) -> dict[str, Any]:
    """Return the arrays of a snapshot by name; StateError if it is damaged, or not one of ours."""
    with path.open("rb") as file:
        try:
            state = dict(open_state(file))
        except MemoryError:
            raise
        except Exception as error:  # a damaged file may lead zipfile to raise anything
            raise StateError(f"{path} can't be read as a snapshot: {error}") from error
    if TAKEN_BY not in state:
        raise StateError(f"{path} was not taken by multi_node_snapshot")
    # A wrong byte in the list of them hides some; all others are in arrays, which have checksums,
    # or mean nothing.
    found, written = sum(each.dtype != object for each in state.values()), int(state[TAKEN_BY][-1])
    if found != written:
        raise StateError(f"{path} is damaged: it has {found} arrays instead of {written}")
    return state

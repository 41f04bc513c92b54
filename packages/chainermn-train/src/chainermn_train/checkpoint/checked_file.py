"""A rank's file of a checkpoint: an uncompressed `.npz` that has a checksum of each array."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

from .atomic_file import new_file

# Prefix of names that aren't Chainer's. Those of a multi-node optimizer begin with
# "chainermn/".
RESERVED_PREFIX = "chainermn-file/"
_HEADER = RESERVED_PREFIX + "header"
_FORMAT = 5
State: TypeAlias = dict[str, np.ndarray]


class DamagedError(ValueError):
    """A file isn't what a rank wrote for a checkpoint."""


@dataclass
class RankFile:
    """The contents of a file: which one it is, and what a rank saves."""

    run: str  # the name of the run
    save: str  # the number of the save, or the name of a snapshot
    id: str  # another one for each checkpoint that was ever written
    rank: int
    size: int  # number of files of the checkpoint
    shared: State  # the rank's part of the arrays that all ranks have alike
    own: State  # arrays that differ between ranks

    def for_others(self) -> RankFile:
        """Return this file without the arrays that no other rank needs."""
        needed = {
            name: array
            for name, array in self.own.items()
            if "iterator:" in name  # how far iterators are
        }
        return replace(self, own=needed)

    def arrays(self) -> State:
        """Return all arrays of the file by name, the header first; they aren't copied.

        Chainer's :func:`chainer.serializers.load_npz` finds them under their own names.
        """
        header = {
            **vars(self),
            "format": _FORMAT,
            "shared": list(self.shared),
            "own": list(self.own),
        }
        text = json.dumps(header).encode()
        return {_HEADER: np.frombuffer(text, np.uint8), **self.shared, **self.own}


def merge(files: Iterable[RankFile]) -> State:
    """Return the arrays that all ranks have alike; DamagedError if files don't belong together."""
    merged: State = {}
    ids = set()
    for file in files:
        ids.add(file.id)
        merged.update(file.shared)
    if len(ids) > 1:
        raise DamagedError("its files are of several saves")
    return merged


def write_file(path: Path, arrays: State) -> None:
    """Write arrays by names into a file, which gets its name once it is on the disk."""
    with new_file(path) as file:
        write_npz(file, arrays)


def write_npz(file: BinaryIO, arrays: State) -> None:
    """Write arrays by names as numpy.savez does, but under any name (it refuses "file")."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(name + ".npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read_rank_file(path: Path) -> RankFile:
    """Return the contents of a file; DamagedError unless it is whole."""
    with path.open("rb") as file:
        try:
            archive = zipfile.ZipFile(file)
            header = json.loads(_read(archive, _HEADER).tobytes())
            number = header.pop("format")
            if number != _FORMAT:
                raise ValueError(f"format {number}, read is {_FORMAT}")
            for kind in "shared", "own":
                header[kind] = {name: _read(archive, name) for name in header[kind]}
            return RankFile(**header)
        except MemoryError:
            raise
        except Exception as error:  # a damaged file may lead zipfile to raise anything
            raise DamagedError(
                f"{path.name} is damaged, or no file of a checkpoint of this version: "
                f"{type(error).__name__}: {error}"
            ) from error


def _read(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(name + ".npy") as member:
        array: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
        if member.read():  # the checksum is compared once all bytes are read
            raise ValueError(f"{name!r} isn't what was written")
    return array

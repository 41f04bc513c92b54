"""A rank's file of a checkpoint: an uncompressed `.npz` with a checksum of each array."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .atomic_file import new_file

# The prefix of the names that a checkpoint adds to Chainer's. The names that a
# multi-node optimizer adds begin with "chainermn/".
RESERVED_PREFIX = "chainermn-file/"
_HEADER = RESERVED_PREFIX + "header"
_FORMAT = 5
# Arrays in C order, by name.
State = dict[str, np.ndarray]


class DamagedError(ValueError):
    """A file is damaged, or no rank wrote the file for a checkpoint."""


@dataclass
class RankFile:
    """The contents of one file: the fields that identify the file, and the arrays in it."""

    run: str  # the name of the run
    save: str  # the number of the save, or the name of a snapshot
    id: str  # a random text, the same in all files of one save
    rank: int  # the number of the file among the files of the save
    size: int  # the number of files of the save
    shared: State  # this file's part of the arrays that are the same on all ranks
    own: State  # the arrays that differ between ranks

    def for_others(self) -> RankFile:
        """Return this file without the arrays that no other rank needs."""
        needed = {
            name: array
            for name, array in self.own.items()
            if "iterator:" in name  # the positions of iterators
        }
        return replace(self, own=needed)

    def arrays(self) -> State:
        """Return all arrays of the file by name, the header first, without a copy.

        :func:`chainer.serializers.load_npz` finds the arrays under Chainer's own names.
        """
        header = {
            **vars(self),
            "format": _FORMAT,
            "shared": list(self.shared),
            "own": list(self.own),
        }
        text = json.dumps(header).encode()
        return {_HEADER: np.frombuffer(text, np.uint8), **self.shared, **self.own}


def write_file(path: Path, arrays: State) -> None:
    """Write arrays into a file, which gets its name once its bytes are on the disk."""
    with new_file(path) as file:
        write_npz(file, arrays)


def write_npz(file: BinaryIO, arrays: State) -> None:
    """Write arrays as numpy.savez does, but under any names; numpy.savez refuses "file"."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(name + ".npy", "w", force_zip64=True) as member:
                form = np.lib.format.header_data_from_array_1_0(array)
                np.lib.format.write_array_header_1_0(member, form)
                # NumPy's own function would copy the elements first.
                member.write(bytes_of(array))


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the memory of an array in C order."""
    return array.reshape(-1).view(np.uint8).data


def read_rank_file(path: Path) -> RankFile:
    """Return the contents of a file.

    Raises:
        DamagedError: the file isn't complete, or not of this version.
    """
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
        member.read()  # zipfile compares the checksum at the end
    return array

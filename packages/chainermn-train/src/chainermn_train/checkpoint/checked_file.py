"""A rank's file of a checkpoint: an uncompressed `.npz` that has a checksum of each array."""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np

# Prefix of names that aren't Chainer's. Those of a multi-node optimizer begin with
# "chainermn/".
RESERVED_PREFIX = "chainermn-file/"
_HEADER = RESERVED_PREFIX + "header"
_FORMAT = 4
State: TypeAlias = dict[str, np.ndarray]


class DamagedError(ValueError):
    """A file isn't what a rank wrote for a checkpoint."""


@dataclass(frozen=True)
class Head:
    """Which file of which checkpoint a file is."""

    name: str  # of the run
    iteration: str  # or the name of a snapshot
    id: str  # another one for each checkpoint that was ever written
    rank: int
    size: int  # number of files of the checkpoint


@dataclass
class RankFile:
    """The contents of a file: which one it is, and what a rank saves."""

    head: Head
    shared: State  # the rank's part of what all have alike
    own: State  # what differs between ranks

    def for_others(self) -> RankFile:
        """Return this without what no other rank needs."""
        needed = {
            name: array
            for name, array in self.own.items()
            if "iterator:" in name  # how far iterators are
        }
        return replace(self, own=needed)

    def arrays(self) -> State:
        """Return what the file has by name, the header first; arrays aren't copied.

        Chainer's :func:`chainer.serializers.load_npz` finds them under their own names.
        """
        header = {
            "format": _FORMAT,
            "head": asdict(self.head),
            "shared": list(self.shared),
            "own": list(self.own),
        }
        text = json.dumps(header).encode()
        return {_HEADER: np.frombuffer(text, np.uint8), **self.shared, **self.own}


def write_npz(file: BinaryIO, arrays: State) -> None:
    """Write arrays by names as numpy.savez does, which has no names such as "file"."""
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
            if header["format"] != _FORMAT:
                raise ValueError(f"format {header['format']}, read is {_FORMAT}")
            return RankFile(
                head=Head(**header["head"]),
                shared={name: _read(archive, name) for name in header["shared"]},
                own={name: _read(archive, name) for name in header["own"]},
            )
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

"""What one rank writes of a checkpoint: a shard, in a file of NumPy's that checks itself."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from .atomic_file import BegunFile, begun

# Prefix of names that aren't Chainer's. Those of a multi-node optimizer begin with
# "chainermn/".
RESERVED_PREFIX = "chainermn-file/"
_HEADER, _OWN, _PIECE = (
    RESERVED_PREFIX + each for each in ("header", "own/", "piece/")
)
# Of a rank's own: how far its iterators are, and the gradients that it has added up.
_NEEDED = re.compile("iterator:|chainermn/group/")
_HEADER_AT = 30  # bytes: the length of a zip archive's header before its first name
_FORMAT = 2
# What NumPy can't store without pickling, and Chainer has: None.
State: TypeAlias = dict[str, np.ndarray | None]


class DamagedError(ValueError):
    """A file isn't what was written, or is no shard of a checkpoint at all."""


class Piece(NamedTuple):
    """Elements of an array, in C order, from ``start`` on."""

    shape: tuple[int, ...]  # of the whole array
    start: int
    data: np.ndarray  # 1-D


@dataclass(frozen=True)
class Head:
    """The place of a shard in its run."""

    name: str  # of the run
    iteration: int | str  # a str of the numbers in the name of a snapshot
    id: str  # another one for each generation that was ever written
    rank: int
    size: int  # number of shards


@dataclass
class Shard:
    """The contents of a file."""

    shared: State = field(default_factory=dict)  # arrays, the same on all ranks
    # Of such arrays, by their names.
    pieces: dict[str, Piece] = field(default_factory=dict)
    own: State = field(default_factory=dict)  # what differs between ranks

    def without_private(self) -> Shard:
        """Return this without what no other rank needs to go on, on as many ranks."""
        needed = {name: it for name, it in self.own.items() if _NEEDED.search(name)}
        return Shard(self.shared, self.pieces, needed)


def encode(head: Head, shard: Shard) -> dict[str, np.ndarray]:
    """Return the arrays of a file, by name, the header first; they are those of the shard.

    Chainer's :func:`chainer.serializers.load_npz` finds shared ones under their own
    names.
    """
    arrays: State = dict(shard.shared)
    arrays.update({_PIECE + name: piece.data for name, piece in shard.pieces.items()})
    arrays.update({_OWN + name: array for name, array in shard.own.items()})
    present = {name: array for name, array in arrays.items() if array is not None}
    header = {
        "format": _FORMAT,
        **asdict(head),
        "arrays": {name: _form_of(array) for name, array in present.items()},
        "pieces": {
            name: (piece.shape, piece.start) for name, piece in shard.pieces.items()
        },
        "none": [name for name, array in arrays.items() if array is None],
    }
    return {_HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8), **present}


def begin_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> BegunFile:
    """Write arrays by names as numpy.savez does, into a file that has :func:`begun`."""

    def fill(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, array in arrays.items():
                with archive.open(name + ".npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)

    return begun(path, fill)


def read_head(path: Path) -> Head:
    """Return which shard a file is; DamagedError if it can't be read."""
    with path.open("rb") as file:
        header, _ = _opened(path, file)
    return Head(**{name: header[name] for name in Head.__dataclass_fields__})


def is_ours(path: Path) -> bool:
    """Return whether a file may be a shard, even if it is damaged; else it is somebody else's."""
    mark = _HEADER.encode() + b".npy"
    with path.open("rb") as file:
        beginning = file.read(_HEADER_AT + len(mark))
    return not beginning or beginning[_HEADER_AT:] == mark


def read_shard(path: Path) -> Shard:
    """Return the contents of a file; DamagedError unless it is whole."""
    with path.open("rb") as file:
        header, npz = _opened(path, file)
        try:
            arrays = {name: npz[name] for name in npz.files if name != _HEADER}
        except Exception as error:
            raise _damaged(path, error) from error
    if {name: _form_of(array) for name, array in arrays.items()} != header["arrays"]:
        raise DamagedError(
            f"{path.name} is damaged: its arrays aren't those that were written"
        )
    shard = Shard()
    for name, array in {**arrays, **dict.fromkeys(header["none"])}.items():
        if name.startswith(_OWN):
            shard.own[name.removeprefix(_OWN)] = array
        elif name.startswith(_PIECE):
            shape, start = header["pieces"][name.removeprefix(_PIECE)]
            shard.pieces[name.removeprefix(_PIECE)] = Piece(tuple(shape), start, array)
        else:
            shard.shared[name] = array
    return shard


def _opened(path: Path, file: BinaryIO) -> tuple[dict[str, Any], Any]:
    """Return the header of a file, and its arrays."""
    try:
        npz = np.load(file, allow_pickle=False)
        header = json.loads(npz[_HEADER].tobytes())
    except Exception as error:  # a damaged file may lead zipfile to raise anything
        if not is_ours(path):
            text = f"{path.name} is no shard of a checkpoint of this version"
            raise DamagedError(text) from None
        raise _damaged(path, error) from error
    if header["format"] != _FORMAT:
        raise DamagedError(
            f"{path.name} is of a newer version, format {header['format']}"
        )
    return header, npz


def _damaged(path: Path, error: Exception) -> Exception:
    if isinstance(error, MemoryError | DamagedError):
        return error
    return DamagedError(f"{path.name} is damaged: {type(error).__name__}: {error}")


def _form_of(array: np.ndarray) -> list[Any]:
    return [str(array.dtype), list(array.shape)]

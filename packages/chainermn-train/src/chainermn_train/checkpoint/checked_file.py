"""A rank's file of a checkpoint: an uncompressed `.npz` that has a checksum of each array."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np

# Prefix of names that aren't Chainer's. Those of a multi-node optimizer begin with
# "chainermn/".
RESERVED_PREFIX = "chainermn-file/"
_HEADER = RESERVED_PREFIX + "header"
# What other ranks may need of a rank's own state: how far its iterators are, and the
# gradients that it has added up.
_NEEDED_BY_OTHERS = re.compile("iterator:|chainermn/group/")
_FORMAT = 3
# What NumPy can't store without pickling, and Chainer has: None.
State: TypeAlias = dict[str, np.ndarray | None]


class DamagedError(ValueError):
    """A file isn't what a rank wrote for a checkpoint."""


@dataclass(frozen=True)
class Head:
    """Which file of which checkpoint a file is."""

    name: str  # of the run
    iteration: str  # or the numbers in the name of a snapshot
    id: str  # another one for each checkpoint that was ever written
    rank: int
    size: int  # number of files of the checkpoint


@dataclass
class RankFile:
    """The contents of a file: its place, and what a rank saves."""

    head: Head
    shared: State  # the rank's part of what all have alike
    own: State  # what differs between ranks

    def for_others(self) -> RankFile:
        """Return this without what no other rank needs."""
        needed = {
            name: array
            for name, array in self.own.items()
            if _NEEDED_BY_OTHERS.search(name)
        }
        return replace(self, own=needed)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what the file has by name, the header first; arrays aren't copied.

        Chainer's :func:`chainer.serializers.load_npz` finds them under their own names.
        """
        header = {
            "format": _FORMAT,
            "head": asdict(self.head),
            "shared": {name: _form_of(array) for name, array in self.shared.items()},
            "own": {name: _form_of(array) for name, array in self.own.items()},
        }
        text = json.dumps(header).encode()
        arrays = {_HEADER: np.frombuffer(text, np.uint8)}
        arrays.update(without_none({**self.shared, **self.own}))
        return arrays


def without_none(state: State) -> dict[str, np.ndarray]:
    """Return what NumPy can store."""
    return {name: array for name, array in state.items() if array is not None}


def write_npz(file: BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by names as numpy.savez does, which has no names such as "file"."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(name + ".npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def read_rank_file(path: Path) -> RankFile:
    """Return the contents of a file; DamagedError unless it is whole."""
    with path.open("rb") as file:
        try:
            npz = np.load(file, allow_pickle=False)
            header = json.loads(npz[_HEADER].tobytes())
            if header["format"] != _FORMAT:
                raise ValueError(f"format {header['format']}, read is {_FORMAT}")
            return RankFile(
                head=Head(**header["head"]),
                shared=_read_arrays(npz, header["shared"]),
                own=_read_arrays(npz, header["own"]),
            )
        except MemoryError:
            raise
        except Exception as error:  # a damaged file may lead zipfile to raise anything
            raise DamagedError(
                f"{path.name} is damaged, or no file of a checkpoint of this version: "
                f"{type(error).__name__}: {error}"
            ) from error


def _read_arrays(npz: Any, forms: dict[str, Any]) -> State:
    state: State = {}
    for name, form in forms.items():
        array = None if form is None else npz[name]
        # NumPy takes the checksum of an array only if it reads all its bytes.
        if _form_of(array) != form:
            raise ValueError(f"{name!r} isn't what was written")
        state[name] = array
    return state


def _form_of(array: np.ndarray | None) -> list[Any] | None:
    return None if array is None else [str(array.dtype), list(array.shape)]

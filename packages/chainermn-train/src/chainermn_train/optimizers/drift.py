"""A detector of ranks whose parameters or optimizer state have drifted apart.

In each update ranks compare a checksum of one slice, in the next one that of the slice
that follows; a turn goes through all. The checksum rides in the synchronization that is
there anyway.
"""

from __future__ import annotations

import struct
import zlib
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from chainermn_comm import CommunicatorBase
from chainermn_comm.gpu import devices, staging
from chainermn_comm.signatures import mismatch_error, view_of

from ..collective_errors import allgather_checked
from ..host_arrays import to_host
from ..optimizer_state import array_of, describe_settings, keys_of, updates_of
from .decision import OPERATION
from .parameter_set import ParameterSet

# Bytes of a slice, which takes some ten microseconds, and most slices: of a large model
# they are longer. Adler-32 needs no table; that of CRC-32 takes as much of the caches
# as the slice.
SLICE_BYTES = 2 << 10
MOST_SLICES = 1000
_COUNTS = struct.Struct("<qqd")
_REMEDY = (
    "; call synchronize() on all ranks to give them rank 0's state, and see "
    "create_multi_node_optimizer's on_drift"
)


class Piece(NamedTuple):
    """A part of an array that belongs to a parameter; the array is looked up when it is read."""

    name: str  # of the parameter
    param: Any
    key: str  # of what belongs to it
    start: int = 0
    stop: int = 0

    def elements(self) -> Any:
        """Return the part's elements, in C order, 1-D, on the array's device."""
        array = array_of(self.param, self.key)
        if type(array) is not np.ndarray and devices.on_gpu(array):
            flat = devices.c_ordered(array).reshape(-1)
        else:
            flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
        return flat[self.start : self.stop]

    def __str__(self) -> str:
        return f"{self.key} of parameter {self.name}"


class _Copy(NamedTuple):
    """A part on its way to the host."""

    source: Any  # kept until it is copied
    host: Any  # an array
    events: list[Any]  # which happen then


class DriftDetector:
    """Where one optimizer is in its turn."""

    def __init__(self) -> None:
        # Of the next slice's pieces, if they are on GPUs.
        self._copies: list[_Copy] = []
        self.restart()

    def __deepcopy__(self, memo: dict[int, Any]) -> DriftDetector:
        return DriftDetector()

    def restart(self) -> None:
        """Begin anew, as all ranks have the same state."""
        self._wait()
        self._copies = []
        self._turn: list[list[Piece]] = []  # slices
        self._is_of: list[tuple[Any, ...]] = []  # what the turn goes through
        self._are_on_gpus = False
        self._alike_at: list[int] = []  # by slice: steps when ranks last had the same
        self._next = 0  # the slice that is compared next
        self._began_at = 0  # steps when the turn began

    def checksum(self, params: ParameterSet, optimizer: Any) -> int:
        """Return the checksum of the next slice, of ``t`` and of the loss scale."""
        self._steps = steps = _steps(optimizer)
        # The first step makes momenta: a turn that was cut before lacks them.
        if self._next >= len(self._turn) or (steps and not self._began_at):
            self._begin_turn(params)
        scale = getattr(optimizer, "_loss_scale", None) or 0.0
        value = zlib.adler32(_COUNTS.pack(steps, self._next, scale))
        if copies := self._copies:
            self._wait()
        for place, piece in enumerate(self._turn[self._next]):
            part = copies[place].host if copies else piece.elements()
            if type(part) is not np.ndarray:
                part = to_host(part)
            value = zlib.adler32(part, (value + updates_of(piece.param)) & 0xFFFFFFFF)
        return value

    def advance(self) -> None:
        """Go on to the next slice, as ranks have the same."""
        if not self._turn:  # a new one begins
            return
        self._alike_at[self._next] = self._steps
        self._next += 1
        if self._are_on_gpus:  # the next slice comes while the step computes
            pieces = self._turn[self._next] if self._next < len(self._turn) else []
            self._copies = [_begin_copy(piece.elements()) for piece in pieces]

    def _wait(self) -> None:
        if self._copies:
            staging.wait([event for each in self._copies for event in each.events])

    def raise_difference(self, communicator: CommunicatorBase, optimizer: Any) -> None:
        """Raise RankMismatchError that names what differs, if anything does (collective).

        Nothing does where only the bits of NaNs differ, or where ranks are at different
        slices, as after an interruption: they begin a new turn.
        """
        pieces, present = (
            self._turn[self._next],
            _pieces_of(ParameterSet(optimizer.target)),
        )
        heads = [
            *describe_settings(optimizer, is_shared=True).items(),
            ("t", _steps(optimizer)),
            ("the loss scale", getattr(optimizer, "_loss_scale", None)),
            *[
                (str(it), (array := array_of(*it[1:3])).dtype, array.shape)
                for it in present
            ],
            *[(f"updates of {it.name}", updates_of(it.param)) for it in present],
        ]
        place = [(str(it), it.start, it.stop) for it in pieces]
        parts = [to_host(piece.elements()) for piece in pieces]
        rows = allgather_checked(communicator, OPERATION, lambda: (heads, place, parts))
        are_alike = all(row[0] == heads for row in rows)
        if are_alike and any(row[1] != rows[0][1] for row in rows):
            self.restart()
            return
        signatures = [list(row[0]) for row in rows]
        for number, piece in enumerate(pieces if are_alike else []):
            views = [row[2][number] for row in rows]
            different = np.flatnonzero(
                np.any([_differs(views[0], it) for it in views], axis=0)
            )
            for index in different[:1]:
                name = f"element {piece.start + index} of the {piece}"
                for signature, view in zip(signatures, views, strict=True):
                    signature.append((name, repr(view[index].item())))
        if any(signature != signatures[0] for signature in signatures):
            views = [view_of(OPERATION, each) for each in signatures]
            error = mismatch_error(OPERATION, communicator.rank, views)
            since = self._alike_at[self._next]
            error.args = (f"{error} (perhaps since t = {since}){_REMEDY}",)
            raise error

    def _begin_turn(self, params: ParameterSet) -> None:
        """Cut all that there is now into slices, unless it is what there was before."""
        self._wait()
        self._copies, self._next, self._began_at = [], 0, self._steps
        pieces = _pieces_of(params)
        arrays = [array_of(piece.param, piece.key) for piece in pieces]
        self._are_on_gpus = any(map(devices.on_gpu, arrays))
        sizes = [(array.size, array.itemsize) for array in arrays]
        before, self._is_of = (
            self._is_of,
            [(id(it[1]), it.key) for it in pieces] + sizes,
        )
        if self._is_of == before:
            return
        most = max(
            SLICE_BYTES, -(-sum(array.nbytes for array in arrays) // MOST_SLICES)
        )
        turn: list[list[Piece]] = [[]]
        room = most
        for piece, array in zip(pieces, arrays, strict=True):
            start, stop = 0, -1
            while stop != array.size:
                if room < array.itemsize:
                    turn.append([])
                    room = most
                stop = min(array.size, start + room // array.itemsize)
                turn[-1].append(piece._replace(start=start, stop=stop))
                room -= (stop - start) * array.itemsize
                start = stop
        # Momenta come to be in the first step: slices aren't those of the turn before
        # then.
        if len(self._alike_at) != len(turn):
            self._alike_at = [min(self._alike_at, default=self._steps)] * len(turn)
        self._turn = turn


def is_same_on_all(communicator: CommunicatorBase, optimizer: Any) -> bool:
    """Return whether ranks have the same bits of what an update would broadcast (collective)."""

    def digest() -> list[Any]:
        found: list[Any] = [_steps(optimizer), getattr(optimizer, "_loss_scale", None)]
        for it in sorted(_pieces_of(ParameterSet(optimizer.target)), key=str):
            array = np.ascontiguousarray(to_host(array_of(it.param, it.key)))
            checksum = zlib.crc32(array.reshape(-1).view(np.uint8).data)
            found.append(
                (str(it), str(array.dtype), array.shape, updates_of(it.param), checksum)
            )
        return found

    rows = allgather_checked(communicator, "comparison of parameters", digest)
    return rows.count(rows[0]) == len(rows)


def _pieces_of(params: ParameterSet) -> list[Piece]:
    return [Piece(*it, key) for it in params.namedparams() for key in keys_of(it[1])]


def _steps(optimizer: Any) -> int:
    steps = getattr(optimizer, "t", 0)
    # A mock's.
    return int(steps) if type(steps) is int or isinstance(steps, Integral) else 0


def _begin_copy(source: Any) -> _Copy:
    if not devices.on_gpu(source):
        return _Copy(source, source.copy(), [])
    with devices.using_device_of(source):
        host = devices.pinned(source.nbytes)
        devices.copy(source.view(np.uint8), host, devices.current_stream())
        return _Copy(source, host, [devices.recorded_event()])


def _differs(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return which elements have other bits, but for NaNs in both."""
    rows = [
        np.ascontiguousarray(it).view(np.uint8).reshape(it.size, -1)
        for it in (one, other)
    ]
    are_none = (one != one) & (other != other)
    found: np.ndarray = np.any(rows[0] != rows[1], axis=1) & ~are_none
    return found

"""A detector of ranks whose parameters or optimizer state have drifted apart.

In each update ranks compare a checksum of one slice, in the next one that of the slice that
follows; a turn goes through all. The checksum rides in the synchronization that is there anyway.
"""

from __future__ import annotations

import struct
import zlib
from numbers import Integral, Number
from typing import Any, NamedTuple

import numpy as np

from chainermn_comm import CommunicatorBase, RankMismatchError, devices, staging
from chainermn_comm.errors import raise_mismatch

from ..collective_errors import run_on_all_ranks
from ..host_arrays import to_host
from ..parameter_set import ParameterSet
from .decision import OPERATION
from .optimizer_state import master_weight

# A slice takes some ten microseconds, with caches that the training has filled. Where a model is
# large, and its updates long, it grows with the model, so that a turn takes no more updates than
# this. Adler-32 needs no table; that of CRC-32 takes as much of the caches as the slice.
SLICE_BYTES = 2 << 10
MOST_SLICES = 1000
_COUNTS = struct.Struct("<qqqd")
_VALUE, _MASTER = "value", "float32 value"  # what isn't in a rule's state
_REMEDY = (
    "; call synchronize() on all ranks to give them rank 0's state, and see "
    "create_multi_node_optimizer's on_drift"
)


class Piece(NamedTuple):
    """A part of an array that belongs to a parameter; the array is looked up when it is read."""

    name: str  # of the parameter
    param: Any
    key: str  # of the update rule's state, or one of those above
    start: int = 0
    stop: int = 0

    def array(self) -> Any:
        """Return the whole array; one of no elements if it is gone."""
        rule = getattr(self.param, "update_rule", None)
        if self.key == _VALUE:
            found = self.param.array
        elif self.key == _MASTER:
            found = master_weight(rule)
        else:
            found = (getattr(rule, "state", None) or {}).get(self.key)
        if hasattr(found, "flags"):
            return found
        return np.array([found] if isinstance(found, Number) else [], np.complex128)

    def elements(self) -> Any:
        """Return the part's elements, in C order, 1-D, on the array's device."""
        array = self.array()
        if type(array) is not np.ndarray and devices.on_gpu(array):
            return staging.flat(array)[self.start : self.stop]
        flat = array.reshape(-1) if array.flags.c_contiguous else array.flat
        return flat[self.start : self.stop]

    def updates(self) -> int:
        """Return how often the parameter was updated."""
        rule = getattr(self.param, "update_rule", None)
        return 0 if rule is None else int(rule.t)


class _Slice(NamedTuple):
    """A slice that is compared, on the host or on its way there."""

    number: int
    pieces: list[Piece]
    updates: int  # the sum of the pieces' counts
    parts: list[Any]  # the pieces' elements
    sources: list[Any]  # those on GPUs, kept until they are copied
    events: list[Any]  # which happen when all are here


class DriftDetector:
    """Where one optimizer is in its turn."""

    def __init__(self) -> None:
        self.restart()
        # By slice: the count of steps when ranks last had the same.
        self._alike_at: list[int] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> DriftDetector:
        twin = memo[id(self)] = DriftDetector()
        return twin

    def restart(self) -> None:
        """Begin anew, as all ranks have the same state."""
        if (copying := getattr(self, "_copying", None)) is not None:  # to memory that is free then
            staging.wait(copying.events)
        self._turn: list[list[Piece]] = []
        self._alike_at = []
        self._next = 0  # the slice that is looked at next
        self._copying: _Slice | None = None  # that slice, if it is on GPUs
        self._compared = _Slice(0, [], 0, [], [], [])  # whose checksum was made last

    def checksum(self, params: ParameterSet, optimizer: Any) -> int:
        """Return the checksum of the next slice, of ``t`` and of the loss scale."""
        steps = _steps(optimizer)
        if self._next >= len(self._turn):
            self._begin_turn(params, steps)
        found = self._compared = self._copying or self._read()
        if found.events:
            staging.wait(found.events)
        scale = getattr(optimizer, "_loss_scale", None) or 0.0
        value = zlib.adler32(_COUNTS.pack(steps, self._next, found.updates, scale))
        for part in found.parts:
            value = zlib.adler32(part.view(np.uint8), value)
        return value

    def advance(self, optimizer: Any) -> None:
        """Go on to the next slice, as ranks have the same."""
        self._copying = None
        if not self._turn:  # a new one begins
            return
        self._alike_at[self._next] = _steps(optimizer)
        self._next += 1
        if self._compared.events and self._next < len(self._turn):
            self._copying = self._read()  # it comes while the step computes

    def _read(self) -> _Slice:
        """Take the elements of the next slice, or begin to copy them from GPUs."""
        updates, pieces = 0, self._turn[self._next]
        parts: list[Any] = []
        sources: list[Any] = []
        events: list[Any] = []
        for piece in pieces:
            array = piece.param.array if piece.key == _VALUE else piece.array()
            if type(array) is np.ndarray and array.flags.c_contiguous:  # written out, as it is fast
                part = array.reshape(-1)[piece.start : piece.stop]
            else:
                part = piece.elements()
            if type(part) is not np.ndarray:
                with devices.using_device_of(part):
                    sources.append(part)
                    part = devices.pinned(part.nbytes)
                    stream = devices.current_stream()
                    devices.copy_to_host(sources[-1].view(np.uint8), part, stream)
                    events.append(devices.recorded_event())
            parts.append(part)
            updates += piece.updates()
        return _Slice(self._next, pieces, updates, parts, sources, events)

    def raise_difference(self, communicator: CommunicatorBase, optimizer: Any) -> None:
        """Raise RankMismatchError that names what differs, if anything does (collective).

        Nothing does where only the bits of NaNs differ, or where an interruption has left ranks at
        different slices: these begin a new turn.
        """
        place, pieces = self._compared[:2]
        parts = [to_host(piece.elements()) for piece in pieces]
        forms = [(_state_of(each), each.array().dtype, each.array().shape) for each in pieces]
        heads = [
            ("t", _steps(optimizer)),
            ("the loss scale", getattr(optimizer, "_loss_scale", None)),
            *forms,
            *[(f"updates of {each.name}", each.updates()) for each in pieces],
        ]
        mine = self._next, heads, parts
        rows = run_on_all_ranks(communicator, OPERATION, lambda: mine)
        if len({row[0] for row in rows}) > 1:
            self.restart()
            return
        if any(row[1] != heads for row in rows):
            _raise(
                communicator, [row[1] for row in rows], "since the last update, or turn of updates"
            )
        for number, piece in enumerate(pieces):
            views = [row[2][number] for row in rows]
            different = np.flatnonzero(np.any([_differs(views[0], it) for it in views], axis=0))
            if different.size:
                index = int(different[0])
                name = f"element {piece.start + index} of the {_state_of(piece)}"
                values = [[(name, repr(view[index].item()))] for view in views]
                since = [*self._alike_at[place : place + 1], min(self._alike_at)][0]
                _raise(communicator, values, f"perhaps since t = {since}")

    def _begin_turn(self, params: ParameterSet, steps: int) -> None:
        """Cut all that there is now into slices."""
        pieces = [piece for pair in params.namedparams() for piece in _pieces_of(*pair)]
        arrays = [piece.array() for piece in pieces]
        most = max(SLICE_BYTES, -(-sum(array.nbytes for array in arrays) // MOST_SLICES))
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
        # Momenta come to be in the first step: slices aren't those of the turn before then.
        before = self._alike_at
        if len(before) != len(turn):
            before = [min(before, default=steps)] * len(turn)
        self._turn, self._alike_at, self._next = turn, before, 0


def _pieces_of(name: str, param: Any) -> list[Piece]:
    rule = getattr(param, "update_rule", None)
    keys = [_VALUE] if param.array is not None else []
    keys += [_MASTER] if master_weight(rule) is not None else []
    keys += sorted(getattr(rule, "state", None) or {})
    return [Piece(name, param, key) for key in keys]


def _steps(optimizer: Any) -> int:
    steps = getattr(optimizer, "t", 0)
    return int(steps) if isinstance(steps, Integral) else 0  # of a double in somebody's test


def _state_of(piece: Piece) -> str:
    return f"{piece.key} of parameter {piece.name}"


def _differs(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return which elements have other bits, but for NaNs in both."""
    rows = [np.ascontiguousarray(it).view(np.uint8).reshape(it.size, -1) for it in (one, other)]
    are_none = (one != one) & (other != other)
    found: np.ndarray = np.any(rows[0] != rows[1], axis=1) & ~are_none
    return found


def _raise(communicator: CommunicatorBase, rows: list[Any], since: str) -> None:
    try:
        raise_mismatch(OPERATION, communicator.rank, rows)
    except RankMismatchError as error:
        error.args = (f"{error} ({since}){_REMEDY}",)
        raise

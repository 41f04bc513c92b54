"""Messages: arrays and objects as buffers of bytes, with a frame that tells how to read them."""

from __future__ import annotations

import math
import pickle
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from .. import devices
from ..arrays import as_array, as_bytes

# How a message's arrays make up the value: one array, one scalar, several, several with a note,
# or a pickle followed by the buffers it left out (pickle protocol 5).
ARRAY, SCALAR, TUPLE, NOTED, OBJECT = "array", "scalar", "tuple", "noted", "object"


class Message(NamedTuple):
    """A value that travels.

    Attributes:
        kind: one of ARRAY, SCALAR, TUPLE, NOTED, OBJECT.
        arrays: contiguous in C or Fortran order.
        scalars: for several, which of the arrays stand for scalars.
        on_gpu: which of its arrays came from a GPU, and shall lie on one where they arrive.
    """

    kind: str
    arrays: tuple[np.ndarray, ...]
    scalars: tuple[int, ...] = ()
    on_gpu: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Of the arrays."""
        total = 0
        for array in self.arrays:  # mostly one or two: a list takes longer
            total += array.nbytes
        return total

    @property
    def buffers(self) -> list[np.ndarray]:
        """The bytes of each array, without copying."""
        return [as_bytes(array) for array in self.arrays]

    def frame(self) -> bytes:
        """What a receiver needs to allocate the arrays."""
        forms = tuple([(a.dtype, a.shape, a.flags.c_contiguous) for a in self.arrays])
        return framed(self.kind, forms, self.scalars, self.on_gpu)

    def packed(self) -> bytes:
        """The bytes of all arrays, one after the other."""
        return b"".join([array.tobytes("A") for array in self.arrays])  # A: as they lie

    def fill(self, packed: bytes) -> None:
        """Overwrite the arrays with what :meth:`packed` gave."""
        start = 0
        for array in self.arrays:
            as_bytes(array)[:] = np.frombuffer(packed, np.uint8, array.nbytes, start)
            start += array.nbytes

    def value(self) -> Any:
        """The array, scalar, tuple or object.

        Raises:
            RuntimeError: an array came from a GPU, and this process can't use one.
        """
        if self.kind == OBJECT:
            data, *buffers = self.arrays
            return MPI.pickle.loads_oob(data, buffers)
        if self.kind in (TUPLE, NOTED) and not self.scalars and not self.on_gpu:
            return self.arrays  # nearly always
        if self.kind == ARRAY:
            return devices.to_device(self.arrays[0]) if self.on_gpu else self.arrays[0]
        values = tuple(
            array[()]
            if self.kind == SCALAR or index in self.scalars
            else (devices.to_device(array) if index in self.on_gpu else array)
            for index, array in enumerate(self.arrays)
        )
        return values[0] if self.kind == SCALAR else values

    def copy(self) -> Message:
        """The same message in memory of its own."""
        arrays = tuple(array.copy(order="K") for array in self.arrays)
        return self._replace(arrays=arrays)


def of_array(data: Any, rank: int) -> Message:
    """The message that carries an array, a scalar, or a tuple or list of them.

    Raises:
        TypeError: ``data`` is something else; the text names ``rank``.
    """
    if isinstance(data, (tuple, list)):
        if all([_is_plain(item) for item in data]):  # nearly always
            return Message(TUPLE, tuple(data))
        others = [i for i, item in enumerate(data) if not isinstance(item, np.ndarray)]
        on_gpu = tuple(i for i in others if devices.on_gpu(data[i]))
        scalars = tuple(i for i in others if i not in on_gpu)
        arrays = tuple(_on_host(item, i in on_gpu, rank) for i, item in enumerate(data))
        return Message(TUPLE, arrays, scalars, on_gpu)
    if _is_plain(data):
        return Message(ARRAY, (data,))
    if isinstance(data, np.ndarray):
        return Message(ARRAY, (_on_host(data, False, rank),))
    if devices.on_gpu(data):
        return Message(ARRAY, (_on_host(data, True, rank),), on_gpu=(0,))
    return Message(SCALAR, (_on_host(data, False, rank),))


def noted(data: tuple[Any, ...], rank: int) -> Message:
    """The message that carries a tuple as :func:`of_array` takes it, to be sent with a note."""
    return of_array(tuple(data), rank)._replace(kind=NOTED)


def of_object(obj: Any) -> Message:
    """The message that carries any picklable object; whatever pickling raises comes through."""
    data, out_of_band = MPI.pickle.dumps_oob(obj)
    buffers: list[Any] = [data, *out_of_band]
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    return Message(OBJECT, tuple(arrays))


def allocate(frame: bytes) -> Message:
    """A message of the framed kind and shapes whose contents are still to be received."""
    kind, forms, scalars, on_gpu = unframed(frame)
    arrays = tuple([room(dtype, shape, order) for dtype, shape, order, _ in forms])
    return Message(kind, arrays, scalars, on_gpu)


def room(dtype: np.dtype, shape: tuple[int, ...], order: Any) -> np.ndarray:
    """An array to be received."""
    return np.empty(shape, dtype, order)


def unframed(frame: bytes) -> Any:
    """The framed message's kind, each array's dtype, shape, order and bytes, scalars and on_gpu."""
    found = unframed_once(frame)
    if found is None:  # it has dtypes whose names the arrays' owner may change
        found = _sized(*pickle.loads(frame))
    return found


def describe(frame: bytes) -> str:
    """The framed message in a few words, for error messages."""
    kind, forms, *_ = pickle.loads(frame)
    if kind == OBJECT:
        return "an object"
    return ", ".join(f"{np.dtype(token)} {shape}" for token, shape, _ in forms) or "nothing"


@lru_cache(maxsize=256)  # loops send the same few forms again and again
def framed(kind: str, forms: Any, *rest: Any) -> bytes:
    """The frame of a kind, each array's dtype, shape and whether it is in C order, and the rest."""
    written = tuple((_token(dtype), shape, "C" if c else "F") for dtype, shape, c in forms)
    return pickle.dumps((kind, written, *rest), protocol=5)


@lru_cache(maxsize=256)
def unframed_once(frame: bytes) -> Any:
    """What :func:`unframed` returns; None of dtypes whose names the arrays' owner may change."""
    kind, forms, scalars, on_gpu = pickle.loads(frame)
    if not all(isinstance(token, str) for token, *_ in forms):
        return None
    return _sized(kind, forms, scalars, on_gpu)


def _sized(kind: str, forms: Any, scalars: Any, on_gpu: Any) -> Any:
    dtypes = [np.dtype(token) for token, *_ in forms]
    sized = tuple(
        (dtype, shape, order, dtype.itemsize * math.prod(shape))
        for dtype, (_, shape, order) in zip(dtypes, forms, strict=True)
    )
    return kind, sized, scalars, on_gpu


def _is_plain(item: Any) -> bool:
    """Whether it is a NumPy array that can be sent as it is."""
    return type(item) is np.ndarray and item.flags.c_contiguous and not item.dtype.hasobject


def _on_host(item: Any, on_gpu: bool, rank: int) -> np.ndarray:
    array = devices.to_host(item) if on_gpu else as_array(item, rank)
    flags = array.flags
    return array if flags.c_contiguous or flags.f_contiguous else np.ascontiguousarray(array)


def _token(dtype: np.dtype) -> Any:
    # A plain dtype travels as its short string; structured and foreign ones as themselves.
    return dtype.str if dtype.isbuiltin == 1 or np.dtype(dtype.str) == dtype else dtype

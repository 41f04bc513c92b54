"""Messages: arrays and objects as buffers of bytes, with a header from which to allocate them."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI

from .. import devices, staging
from ..numbers import as_array, as_bytes, empty

# What a message's arrays stand for: one array, several, several sent with metadata, or
# a pickle followed by its out-of-band buffers (pickle protocol 5).
ARRAY, TUPLE, WITH_METADATA, OBJECT = "array", "tuple", "with_metadata", "object"

# What each of a communicator's ways to receive takes.
ARRAYS, ARRAYS_WITH_METADATA, OBJECTS = (ARRAY, TUPLE), (WITH_METADATA,), (OBJECT,)

# Dtype, shape, and whether the array is C-contiguous (else it is Fortran-contiguous).
ArraySpec: TypeAlias = tuple[np.dtype, tuple[int, ...], bool]


class Message(NamedTuple):
    """A value that travels."""

    kind: str  # one of ARRAY, TUPLE, WITH_METADATA, OBJECT
    # Contiguous in C or Fortran order. Those of `on_gpu` are in host memory while they
    # travel.
    arrays: tuple[Any, ...]
    scalars: tuple[int, ...] = ()  # the indices of arrays that stand for scalars
    # The indices of arrays that came from a GPU, and shall be on one where they arrive.
    on_gpu: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        total = 0
        for array in self.arrays:  # mostly one or two: `sum` takes longer
            total += array.nbytes
        return total

    @property
    def stays(self) -> bool:
        """Whether arrays that came from a GPU are still there."""
        return bool(self.on_gpu) and devices.on_gpu(self.arrays[self.on_gpu[0]])

    def header(self) -> bytes:
        """Return what a receiver needs to allocate the arrays."""
        specs = tuple([(a.dtype, a.shape, a.flags.c_contiguous) for a in self.arrays])
        return _encode_header(self.kind, specs, self.scalars, self.on_gpu)

    def packed(self, *before: bytes) -> bytes:
        """Return these and then the bytes of all arrays, one after the other."""
        # As in memory.
        return b"".join([*before, *[array.tobytes("A") for array in self.arrays]])

    def fill(self, packed: Any, start: int = 0) -> None:
        """Overwrite the arrays by what :meth:`packed` returned, which begins at ``start``."""
        for array in self.arrays:
            end = start + array.nbytes
            as_bytes(array).data[:] = packed[start:end]
            start = end

    def value(self) -> Any:
        """Return the array, scalar, tuple or object."""
        if self.kind == OBJECT:
            data, *buffers = self.arrays
            return MPI.pickle.loads_oob(data, buffers)
        found = self.arrays
        if self.scalars:
            pairs = enumerate(found)
            found = tuple(
                [it[()] if index in self.scalars else it for index, it in pairs]
            )
        return found[0] if self.kind == ARRAY else found

    def copy_to(self, other: Message) -> None:
        """Overwrite the arrays of another message, which has these shapes and dtypes."""
        for array, target in zip(self.arrays, other.arrays, strict=True):
            if isinstance(array, np.ndarray):  # with what fills a structured dtype up
                array, target = as_bytes(array), as_bytes(target)
            target[...] = array


def of_array(data: Any, rank: int) -> Message:
    """Return the message that carries an array, a scalar, or a tuple or list of them.

    Of anything else a TypeError is raised, whose text names ``rank``;
    CommunicationError where arrays can't be copied from a GPU.
    """
    return of_arrays([data], rank)[0]


def of_arrays(
    values: Sequence[Any], rank: int, takes: Callable[[list[Any]], bool] | None = None
) -> list[Message]:
    """Return :func:`of_array` of each value; all arrays on GPUs are copied together.

    They stay on their GPU, and are made contiguous, if ``takes`` says True of all
    arrays.
    """
    found = [_of_array(value, rank) for value in values]
    if not any([each.on_gpu for each in found]):  # nearly always
        return found
    arrays = [array for each in found for array in each.arrays]
    if takes is None or not all(map(devices.on_gpu, arrays)) or not takes(arrays):
        return on_host(found, rank)
    with devices.translated_errors(f"rank {rank}: making GPU arrays contiguous"):
        ordered = [
            it if it.flags.f_contiguous else devices.c_ordered(it) for it in arrays
        ]
        return _moved(found, lambda *_: ordered, rank)


def _of_array(data: Any, rank: int) -> Message:
    """Return the message, whose arrays on GPUs are still there."""
    kind, items = (
        (TUPLE, tuple(data)) if isinstance(data, (tuple, list)) else (ARRAY, (data,))
    )
    plain = [it for it in items if type(it) is np.ndarray and it.flags.c_contiguous]
    if len(plain) == len(items) and not any([it.dtype.hasobject for it in plain]):
        return Message(kind, items)  # nearly always
    others = [i for i, item in enumerate(items) if not isinstance(item, np.ndarray)]
    on_gpu = tuple(i for i in others if devices.on_gpu(items[i]))
    scalars = tuple(i for i in others if i not in on_gpu)
    pairs = enumerate(items)
    arrays = tuple(
        item if i in on_gpu else _contiguous(item, rank) for i, item in pairs
    )
    return Message(kind, arrays, scalars, on_gpu)


def on_host(found: list[Message], rank: int) -> list[Message]:
    """Return messages with all arrays of GPUs copied to host memory; raise CommunicationError."""
    return _moved(found, staging.to_host, rank)


def on_device(found: list[Message], rank: int) -> list[Message]:
    """Return messages that have come, with arrays on the current device that came from one.

    CommunicationError is raised where CUDA fails, or this process can't use a GPU.
    """
    return _moved(found, staging.to_device, rank)


def _moved(
    found: list[Message], move: Callable[..., list[Any]], rank: int
) -> list[Message]:
    """Return messages with all arrays of GPUs replaced by what one ``move`` gives."""
    arrays = [message.arrays[index] for message in found for index in message.on_gpu]
    if not arrays:
        return found
    copies = iter(move(arrays, rank))
    moved = []
    for message in found:
        own = list(message.arrays)
        for index in message.on_gpu:
            own[index] = next(copies)
        moved.append(message._replace(arrays=tuple(own)))
    return moved


def of_objects(objs: Sequence[Any], *_: object) -> list[Message]:
    """Return :func:`of_object` of each."""
    return [of_object(obj) for obj in objs]


def of_object(obj: Any) -> Message:
    """Return the message that carries a picklable object; whatever pickling raises is raised."""
    data, out_of_band = MPI.pickle.dumps_oob(obj)
    buffers: list[Any] = [data, *out_of_band]
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    return Message(OBJECT, tuple(arrays))


def allocate(header: bytes, new: Callable[..., Any] = empty) -> Message:
    """Return a message of the header's kind and specs whose data are still to be received.

    Its arrays are made by ``new(shape, dtype, order)``.
    """
    kind, specs, scalars, on_gpu = _decode_header(header)
    arrays = [
        new(shape, dtype if isinstance(dtype, str) else pickle.loads(dtype), order)
        for dtype, shape, order, _ in specs
    ]
    return Message(kind, tuple(arrays), scalars, on_gpu)


def array_sizes(header: bytes) -> list[int]:
    """Return the bytes of each array; also where one can't be allocated."""
    return [nbytes for *_, nbytes in _decode_header(header)[1]]


@lru_cache(maxsize=256)  # loops send the same few array specs again and again
def _encode_header(kind: str, specs: tuple[ArraySpec, ...], *rest: Any) -> bytes:
    encoded = [
        (
            _dtype_token(dtype),
            shape,
            "C" if c else "F",
            dtype.itemsize * math.prod(shape),
        )
        for dtype, shape, c in specs
    ]
    return pickle.dumps((kind, encoded, *rest), protocol=5)


@lru_cache(maxsize=256)
def _decode_header(header: bytes) -> Any:
    """Return kind, specs (token of the dtype, shape, order, bytes), scalars and on_gpu."""
    return pickle.loads(header)


def _contiguous(item: Any, rank: int) -> np.ndarray:
    array = as_array(item, rank)
    flags = array.flags
    return (
        array
        if flags.c_contiguous or flags.f_contiguous
        else np.ascontiguousarray(array)
    )


# A plain dtype travels as its short string. Structured and foreign ones are pickled
# apart, and unpickled for each array: the names of their fields can be changed by the
# array's owner, and where that fails the array's data can still be discarded.
def _dtype_token(dtype: np.dtype) -> str | bytes:
    is_plain = dtype.isbuiltin == 1 or np.dtype(dtype.str) == dtype
    return dtype.str if is_plain else pickle.dumps(dtype)

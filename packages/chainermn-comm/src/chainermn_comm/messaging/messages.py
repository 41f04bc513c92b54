"""Messages: arrays and objects as buffers of bytes, with a header from which to allocate them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ..gpu import devices, staging
from ..numbers import as_array, as_bytes, empty

# The kinds of messages: one array, several arrays, arrays with metadata, or a pickle
# followed by its out-of-band buffers (pickle protocol 5).
ARRAY, TUPLE, WITH_METADATA, OBJECT = "array", "tuple", "with_metadata", "object"

# The kinds that a receiver may ask for: arrays, arrays with metadata, or an object.
ARRAYS, ARRAYS_WITH_METADATA, OBJECTS = (ARRAY, TUPLE), (WITH_METADATA,), (OBJECT,)


class Message(NamedTuple):
    """A user's value as arrays, with the facts by which a receiver makes the value again."""

    kind: str  # one of ARRAY, TUPLE, WITH_METADATA, OBJECT
    # Contiguous in C or Fortran order. The arrays of `on_gpu` are in host memory while
    # they travel.
    arrays: tuple[Any, ...]
    scalars: tuple[int, ...] = ()  # the indices of arrays that stand for scalars
    # The indices of arrays that came from a GPU, and are put on the receiver's.
    on_gpu: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        total = 0
        for array in self.arrays:  # mostly one or two: `sum` takes longer
            total += array.nbytes
        return total

    def header(self) -> bytes:
        """Return the facts that a receiver needs to allocate the arrays."""
        specs = []
        for array in self.arrays:
            order = "C" if array.flags.c_contiguous else "F"
            specs.append((_dtype_token(array.dtype), array.shape, order))
        return pickle.dumps((self.kind, specs, self.scalars, self.on_gpu), protocol=5)

    def data(self) -> bytes:
        """Return the bytes of all arrays, as they are in memory."""
        return b"".join([array.tobytes("A") for array in self.arrays])

    def fill(self, frame: Any) -> None:
        """Overwrite the arrays by what :meth:`data` returned, at the end of the frame."""
        start = len(frame) - self.nbytes
        for array in self.arrays:
            end = start + array.nbytes
            as_bytes(array).data[:] = frame[start:end]
            start = end

    def value(self) -> Any:
        """Return the array, scalar, tuple or object."""
        if self.kind == OBJECT:
            data, *buffers = self.arrays
            return MPI.pickle.loads_oob(data, buffers)
        found = list(self.arrays)
        for index in self.scalars:
            found[index] = found[index][()]
        if self.kind == ARRAY:
            return found[0]
        return tuple(found)

    def copy_to(self, other: Message) -> None:
        """Overwrite the arrays of another message, which has these shapes and dtypes."""
        for array, target in zip(self.arrays, other.arrays, strict=True):
            # Including the padding of a structured dtype.
            if isinstance(array, np.ndarray):
                as_bytes(target)[...] = as_bytes(array)
            else:
                target[...] = array


def of_array(data: Any, rank: int) -> Message:
    """Return the message that carries an array, a scalar, or a tuple or list of them.

    For anything else a TypeError is raised, whose text names ``rank``. Arrays on GPUs
    stay there; CommunicationError if CUDA can't make them contiguous.
    """
    if isinstance(data, (tuple, list)):
        kind = TUPLE
        items = tuple(data)
    else:
        kind = ARRAY
        items = (data,)
    if all([_is_plain(item) for item in items]):  # nearly always
        return Message(kind, items)
    on_gpu = []
    scalars = []
    for index, item in enumerate(items):
        if devices.on_gpu(item):
            on_gpu.append(index)
        elif not isinstance(item, np.ndarray):
            scalars.append(index)
    arrays = tuple([_contiguous(item, rank) for item in items])
    return Message(kind, arrays, tuple(scalars), tuple(on_gpu))


def of_array_on_host(data: Any, rank: int) -> Message:
    """Return :func:`of_array`, with copies of arrays on GPUs in host memory."""
    return on_host([of_array(data, rank)], rank)[0]


def of_arrays(values: Sequence[Any], rank: int) -> list[Message]:
    """Return :func:`of_array` of each value."""
    return [of_array(value, rank) for value in values]


def on_host(found: list[Message], rank: int) -> list[Message]:
    """Return messages with all arrays of GPUs copied to host memory; raise CommunicationError."""
    return _moved(found, staging.to_host, rank)


def on_device(found: list[Message], rank: int) -> list[Message]:
    """Return received messages with arrays that came from a GPU on the current device.

    CommunicationError is raised if CUDA fails, or this process can't use a GPU.
    """
    return _moved(found, staging.to_device, rank)


def _moved(
    found: list[Message], move: Callable[..., list[Any]], rank: int
) -> list[Message]:
    """Return messages with all arrays of GPUs replaced by copies, which one ``move`` makes."""
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


def of_objects(objs: Sequence[Any], rank: int) -> list[Message]:
    """Return :func:`of_object` of each value; ``rank`` is unused, see :func:`of_arrays`."""
    return [of_object(obj) for obj in objs]


def of_object(obj: Any) -> Message:
    """Return the message that carries a picklable object; raise as pickling does."""
    data, out_of_band = MPI.pickle.dumps_oob(obj)
    buffers: list[Any] = [data, *out_of_band]
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    return Message(OBJECT, tuple(arrays))


def allocate(frame: Any, new: Callable[..., Any] = empty) -> Message:
    """Return a message with uninitialized arrays, by the header at the beginning of the frame.

    Its arrays are made by ``new(shape, dtype, order)``.
    """
    kind, specs, scalars, on_gpu = pickle.loads(frame)
    arrays = []
    for dtype, shape, order in specs:
        if isinstance(dtype, bytes):
            dtype = pickle.loads(dtype)
        arrays.append(new(shape, dtype, order))
    return Message(kind, tuple(arrays), scalars, on_gpu)


def _is_plain(item: Any) -> bool:
    """Return whether the item is an array of NumPy's that can travel as it is."""
    if type(item) is not np.ndarray:
        return False
    return item.flags.c_contiguous and not item.dtype.hasobject


def _contiguous(item: Any, rank: int) -> Any:
    """Return the item as an array in C or Fortran order, on the host or on its GPU."""
    array = item if devices.on_gpu(item) else as_array(item, rank)
    if array.flags.c_contiguous or array.flags.f_contiguous:
        return array
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array)
    with devices.translated_errors(f"rank {rank}: making GPU arrays contiguous"):
        return devices.c_ordered(array)


# A plain dtype travels as its short string. Structured and foreign dtypes are pickled
# separately, and unpickled for each array, because the array's owner can change the names
# of their fields.
def _dtype_token(dtype: np.dtype) -> str | bytes:
    is_plain = dtype.isbuiltin == 1 or np.dtype(dtype.str) == dtype
    return dtype.str if is_plain else pickle.dumps(dtype)

"""The communicator over MPI: each method is composed of a few calls of the folders below."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

from mpi4py import MPI

from .allreduce import AlgorithmCache, Factory, PairwiseAllreduce, mean_arrays, sum_arrays
from .arrays import as_integer
from .communicator import CommunicatorBase, check_metadata, check_payload
from .config import Settings
from .errors import CommunicationError, FinalizedError, capture_error
from .gradients import bcast_parameters, mean_gradients
from .messaging import (
    ARRAY,
    OBJECT,
    SCALAR,
    TUPLE,
    WITH_METADATA,
    Context,
    Message,
    Peer,
    collectives,
    message_of_array,
    message_of_object,
    message_with_metadata,
    point_to_point,
)
from .topology import Topology
from .trace import recorder as traced
from .watchdog import register, watched

# Colors and keys of a split are C ints.
LARGEST_INT = 2**31 - 1
# The kinds of messages that `recv` takes.
ARRAYS = (ARRAY, TUPLE, SCALAR)


@dataclass(frozen=True)
class _Resources:
    """What a communicator owns until it is finalized, and works with."""

    context: Context
    pairwise: PairwiseAllreduce
    comms: tuple[MPI.Intracomm, ...]


class MpiCommunicator(CommunicatorBase):
    """A communicator over MPI, for NumPy and CuPy arrays.

    Made by :func:`chainermn_comm.create_communicator`. Its settings (:meth:`set_config`) are
    ``allreduce_grad_dtype``, ``batched_copy`` and ``chunk_bytes``. Arrays received are new ones;
    what a rank sends to itself is copied, except by ``bcast``, whose root gets its own array back.
    CuPy's arrays travel through host memory (gradients needn't), and arrive on the receiver's
    current device; ``bcast``'s root gets a copy of them.

    All collective methods raise on every rank: ``RankMismatchError`` when ranks call different
    operations or pass arguments that don't fit; where one rank's argument is wrong in itself,
    ``TypeError`` or ``ValueError`` there and ``PeerError`` elsewhere. The communicator can be
    used afterwards. Only one thread at a time may use it; another thread needs a communicator of
    its own, made by :meth:`split`.
    """

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        factories: tuple[Factory, Factory],
        settings: Settings,
        topology: Topology | None = None,
        owns_mpi_comm: bool = False,
    ) -> None:
        """Duplicate ``mpi_comm`` for this communicator's traffic (collective).

        Args:
            mpi_comm: an intracommunicator; the user's own messages on it aren't touched.
            factories: make the algorithms for gradients in host memory and on GPUs.
            settings: what the user chose.
            topology: imposed instead of asking MPI; the same on all ranks.
            owns_mpi_comm: whether ``finalize`` frees ``mpi_comm``.
        """
        own = mpi_comm.Dup()
        self._mpi_comm = mpi_comm
        self._factories = factories
        self._settings = settings
        self._process = os.getpid()
        self._rank, self._size = own.rank, own.size
        watchdogs = register(own, MPI.COMM_WORLD.rank, settings.limit)
        self._record = traced.call_recorder(own, watchdogs, settings.trace)
        topology = topology or Topology.discover(own)
        self._topology = topology
        # Users have all tags but the two largest: one for the messages of the library's own
        # functions, one for those of collectives. Open MPI's communicators that were split don't
        # know the largest tag.
        self.reserved_tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0) - 1
        self._max_tag = self.reserved_tag - 1
        self._interruption = ""
        self._interrupted: _Resources | None = None
        context = Context(
            own,
            traced.handshake(own, self._record),
            self.reserved_tag + 1,
            topology,
            settings.chunk_bytes,
        )
        self._resources: _Resources | None = _Resources(
            context,
            PairwiseAllreduce(own, context.tag, chunk_bytes=settings.chunk_bytes),
            (own, mpi_comm) if owns_mpi_comm else (own,),
        )
        self._algorithms = AlgorithmCache(*factories, context)

    # Rank and topology.

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def intra_rank(self) -> int:
        return self._topology.intra_rank(self._rank)

    @property
    def intra_size(self) -> int:
        return self._topology.intra_size(self._rank)

    @property
    def inter_rank(self) -> int:
        return self._topology.inter_rank(self._rank)

    @property
    def inter_size(self) -> int:
        return self._topology.inter_size

    @property
    def mpi_comm(self) -> MPI.Intracomm:
        """The mpi4py communicator that this one was made from."""
        return self._mpi_comm

    @watched
    def split(self, color: int, key: int) -> MpiCommunicator:
        context = self._context
        numbers, error = capture_error(lambda: self._split_arguments(color, key))
        context.handshake("split", error=error)
        part = MPI.Intracomm(context.comm.Split(*numbers))
        topology = self._topology.restrict(part.allgather(self._rank))
        return MpiCommunicator(part, self._factories, self._settings, topology, owns_mpi_comm=True)

    # Arrays.

    def send(self, data: Any, dest: int, tag: int = 0) -> None:
        peer = self._peer(dest, tag, "dest")
        point_to_point.send("send", message_of_array(data, self._rank), peer, self._record)

    def recv(self, source: int, tag: int = 0) -> Any:
        peer = self._peer(source, tag, "source")
        return point_to_point.recv("recv", ARRAYS, peer, self._record, self._rank)[1]

    def send_with_metadata(
        self,
        metadata: bytes,
        data: tuple[Any, ...],
        dest: int,
        tag: int = 0,
        label: str = "",
        message_id: int = 0,
    ) -> None:
        if type(metadata) is not bytes or type(data) is not tuple or type(message_id) is not int:
            check_metadata(metadata, data, message_id, self._rank)
            data = tuple(data)
        peer = self._peer(dest, tag, "dest", self.reserved_tag)
        try:
            message = message_with_metadata(data, self._rank)
            point_to_point.send("send", message, peer, self._record, label, metadata, message_id)
        except struct.error:
            check_metadata(metadata, data, message_id, self._rank)
            raise

    def recv_with_metadata(
        self, source: int, tag: int = 0, label: str = ""
    ) -> tuple[bytes, tuple[Any, ...], int]:
        peer = self._peer(source, tag, "source", self.reserved_tag)
        kinds = (WITH_METADATA,)
        return point_to_point.recv("recv", kinds, peer, self._record, self._rank, label)

    @watched
    def bcast(self, data: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        # Messages are split where MPI can't count them, so `max_buf_len` has nothing to limit.
        return collectives.bcast(self._context, "bcast", self._array(data), root).value()

    @watched
    def gather(self, data: Any, root: int = 0) -> tuple[Any, ...] | None:
        found = collectives.gather(self._context, "gather", self._array(data), root)
        return None if found is None else tuple(message.value() for message in found)

    @watched
    def alltoall(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        found = collectives.alltoall(self._context, "alltoall", self._each(xs, message_of_array))
        return tuple(message.value() for message in found)

    @watched
    def allreduce(self, data: Any) -> Any:
        resources = self._open
        return sum_arrays(resources.context, resources.pairwise.allreduce, data)

    @watched
    def allgather(self, x: Any) -> tuple[Any, ...]:
        found = collectives.allgather(self._context, "allgather", self._array(x))
        return tuple(message.value() for message in found)

    @watched
    def handshake(
        self,
        operation: str,
        signature: Iterable[tuple[Any, ...]] = (),
        *,
        error: BaseException | None = None,
        payload: bytes = b"",
    ) -> list[bytes]:
        if type(payload) is not bytes:
            error = error or check_payload(payload, operation, self._rank)
            payload = b""
        return self._context.handshake(operation, tuple(signature), payload, error, len(payload))

    @watched
    def scatter(self, xs: Sequence[Any] | None, root: int = 0) -> Any:
        make = self._each(xs, message_of_array)
        return collectives.scatter(self._context, "scatter", make, root).value()

    # Objects.

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        peer = self._peer(dest, tag, "dest")
        point_to_point.send("send_obj", message_of_object(obj), peer, self._record)

    def recv_obj(self, source: int, tag: int = 0) -> Any:
        peer = self._peer(source, tag, "source")
        return point_to_point.recv("recv_obj", (OBJECT,), peer, self._record, self._rank)[1]

    @watched
    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        make = self._object(obj)
        message = collectives.bcast(self._context, "bcast_obj", make, root)
        found = self._unpickled("bcast_obj", {} if self._rank == root else {root: message})
        return found.get(root, obj)

    @watched
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        found = collectives.gather(self._context, "gather_obj", self._object(obj), root)
        objs = self._unpickled("gather_obj", dict(enumerate(found or ())))
        return list(objs.values()) if self._rank == root else None

    @watched
    def allreduce_obj(self, obj: Any) -> Any:
        found = collectives.allgather(self._context, "allreduce_obj", self._object(obj))
        objs = self._unpickled("allreduce_obj", dict(enumerate(found)))
        try:
            return reduce(add, objs.values())
        except TypeError as error:  # on all ranks, since all have the same objects
            kinds = ", ".join(type(obj).__name__ for obj in objs.values())
            raise TypeError(
                f"rank {self._rank}: allreduce_obj can't add the ranks' objects ({kinds}): {error}"
            ) from error

    @watched
    def allgather_obj(self, obj: Any) -> list[Any]:
        found = collectives.allgather(self._context, "allgather_obj", self._object(obj))
        return list(self._unpickled("allgather_obj", dict(enumerate(found))).values())

    @watched
    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        make = self._each(objs, lambda obj, _: message_of_object(obj))
        message = collectives.scatter(self._context, "scatter_obj", make, root)
        return self._unpickled("scatter_obj", {root: message})[root]

    @watched
    def alltoall_obj(self, objs: Sequence[Any]) -> list[Any]:
        make = self._each(objs, lambda obj, _: message_of_object(obj))
        found = collectives.alltoall(self._context, "alltoall_obj", make)
        return list(self._unpickled("alltoall_obj", dict(enumerate(found))).values())

    # Models.

    @watched
    def bcast_data(self, model: Any) -> None:
        bcast_parameters(self._context, model)

    def allreduce_grad(self, model: Any, zero_fill: bool = False) -> None:
        self.multi_node_mean_grad(model, zero_fill)

    @watched
    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
        """Replace each gradient by its mean over ranks (collective).

        Every rank gets the same bits. A gradient that can't be written to, or shares memory
        with another, is replaced by a new array. One that is missing (None) on all ranks stays
        None. The memory that this takes doesn't depend on the model's size: up to 16 MiB a rank,
        kept from the first calls on, and on each node a window of 2 MiB for each rank and one more
        (8 MiB for each and two more where there are other nodes). Each gradient that is replaced
        takes its new array and, where the old one isn't contiguous, a copy during the call.

        An exception in the middle of the sum (no memory, a signal's handler) ends the job, as it
        can't be raised on the other ranks. Where ``CHAINERMN_FORCE_ABORT_ON_EXCEPTION=0`` refuses
        that, later calls on this rank raise CommunicationError.

        Args:
            model: anything with ``namedparams()``; each parameter's ``grad`` (real or complex
                floats) is overwritten or replaced.
            zero_fill: count a gradient that is missing here and present elsewhere as zeros;
                without it such a difference is an error.

        Raises:
            RankMismatchError: on all ranks, naming the first parameter that differs in name,
                shape, dtype or (without ``zero_fill``) presence of the gradient.
        """
        context = self._context
        try:
            mean_gradients(context, self._algorithms, model, self._settings, zero_fill)
        finally:
            if context.interruptions:
                # All of it stays, since MPI may still write where messages were to arrive.
                self._interruption = context.interruptions[0]
                self._interrupted, self._resources = self._resources, None

    @watched
    def multi_node_mean(self, sendbuf: Any, recvbuf: Any = None) -> Any:
        """Return the mean of all ranks' arrays, on every rank (collective).

        Args:
            sendbuf: a float array, or a tuple of them, of the same shape and dtype on all ranks;
                None to overwrite ``recvbuf`` by its mean.
            recvbuf: an array of that shape, into which the mean is written; None for a new array.

        Raises:
            RankMismatchError: on all ranks, when shapes or dtypes differ.
            TypeError: it isn't a float array; PeerError on the other ranks.
            ValueError: ``recvbuf`` doesn't fit; PeerError on the other ranks.
        """
        data = recvbuf if sendbuf is None else sendbuf
        resources = self._open
        return mean_arrays(resources.context, resources.pairwise.allreduce, data, recvbuf)

    # Settings and end of life.

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        """Change ``allreduce_grad_dtype``, ``batched_copy`` or ``chunk_bytes``, on all ranks alike.

        ``chunk_bytes``, the size of the chunks in which gradients travel (see
        :func:`chainermn_comm.create_communicator`; None for the default), can't be changed any
        more once gradients have travelled.
        """
        settings = self._settings.changed(name, value)
        if settings.chunk_bytes != self._settings.chunk_bytes:
            if self._algorithms:
                raise ValueError(
                    f"rank {self._rank}: chunk_bytes can't be changed any more, since gradients "
                    "have travelled; change it right after making the communicator"
                )
            context = replace(self._context, chunk_bytes=settings.chunk_bytes)
            pairwise = PairwiseAllreduce(
                context.comm, context.tag, chunk_bytes=settings.chunk_bytes
            )
            self._resources = replace(self._open, context=context, pairwise=pairwise)
            self._algorithms = AlgorithmCache(*self._factories, context)
        self._settings = settings

    def get_config(self, name: str | None = None) -> Any:
        settings = self._settings.as_dict()
        if name is None:
            return settings
        if name not in settings:
            raise ValueError(f"no setting {name!r}; there are {', '.join(settings)}")
        return settings[name]

    @watched
    def finalize(self) -> None:
        """Free this communicator's MPI resources (collective); later calls raise.

        The communicator that the user gave stays theirs. A second call does nothing, nor does
        one in a process that the rank forked.
        """
        resources = self._resources
        if resources is None or MPI.Is_finalized() or os.getpid() != self._process:
            self._resources = None
            return
        resources.context.handshake("finalize")
        self._resources = None
        self._algorithms.close()
        resources.pairwise.close()
        for comm in resources.comms:
            comm.Free()
        self._record.release()

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Finalize (collective); after an exception, release only what needs no other rank.

        Other ranks may not leave the block, and waiting for them would keep the error from showing.
        So memory and NCCL's communicator are released, and ranks that wait for this one's GPU get
        an error; MPI's communicators and the node's window, which only all ranks together can free,
        stay until the process ends. A program that catches such errors and goes on should do so
        inside of the block, or make no more than some hundred communicators.
        """
        if kind is None:
            self.finalize()
            return
        resources, self._resources = self._resources, None
        if resources is None or MPI.Is_finalized() or os.getpid() != self._process:
            return
        self._record.release()
        resources.pairwise.close()
        self._algorithms.release_local()

    # What the methods above share.

    @property
    def _open(self) -> _Resources:
        if self._interruption:
            raise CommunicationError(
                f"rank {self._rank}: a mean of gradients was interrupted on this rank "
                f"({self._interruption}), so the ranks are at different steps of it: end the job, "
                "or make a new communicator on all ranks"
            )
        if self._resources is None:
            raise FinalizedError(f"rank {self._rank}: the communicator has been finalized")
        if os.getpid() != self._process:
            raise CommunicationError(
                f"rank {self._rank}: a process that the rank forked can't communicate"
            )
        return self._resources

    @property
    def _context(self) -> Context:
        return self._open.context

    def _array(self, data: Any) -> Callable[[], Message]:
        return lambda: message_of_array(data, self._rank)

    def _object(self, obj: Any) -> Callable[[], Message]:
        return lambda: message_of_object(obj)

    def _each(
        self, values: Sequence[Any] | None, one: Callable[[Any, int], Message]
    ) -> Callable[[], list[Message]]:
        def make() -> list[Message]:
            if values is not None and not hasattr(values, "__len__"):
                raise TypeError(
                    f"rank {self._rank}: expected a tuple or list of {self._size} values, one for "
                    f"each rank, got {type(values).__name__}"
                )
            if values is None or len(values) != self._size:
                raise ValueError(
                    f"rank {self._rank}: expected {self._size} values, one for each rank, got "
                    f"{None if values is None else len(values)}"
                )
            return [one(value, self._rank) for value in values]

        return make

    def _peer(self, rank: int, tag: int, name: str, max_tag: int | None = None) -> Peer:
        """Return MPI's communicator, the other rank, and the tag of a message."""
        own, resources = self._rank, self._resources
        max_tag = self._max_tag if max_tag is None else max_tag
        if resources is None or os.getpid() != self._process:
            resources = self._open  # raises
        context = resources.context
        is_plain = type(rank) is type(tag) is int and rank != own  # nearly always
        if is_plain and 0 <= rank < self._size and 0 <= tag <= max_tag:
            return context.comm, rank, tag
        index = collectives.check_rank(context, rank, name)
        if index == own:
            raise ValueError(f"rank {own}: {name} is this rank itself, which would wait for ever")
        number = as_integer(tag)
        if number is None or not 0 <= number <= max_tag:
            raise ValueError(
                f"rank {self._rank}: tag must be an integer from 0 to {max_tag}, got {tag!r}"
            )
        return context.comm, index, number

    def _split_arguments(self, color: int, key: int) -> list[int]:
        numbers = []
        for name, value, least in (("color", color, 0), ("key", key, -LARGEST_INT)):
            number = as_integer(value)
            if number is None or not least <= number <= LARGEST_INT:
                raise ValueError(
                    f"rank {self._rank}: {name} of split must be an integer from {least} to "
                    f"{LARGEST_INT}, got {value!r}"
                )
            numbers.append(number)
        return numbers

    def _unpickled(self, operation: str, found: dict[int, Message]) -> dict[int, Any]:
        """Return the objects; when one can't be unpickled on some rank, all ranks raise."""
        values: dict[int, Any]
        values, error = capture_error(lambda: {rank: m.value() for rank, m in found.items()})
        self._context.handshake(f"{operation}, unpickling", error=error)
        return values

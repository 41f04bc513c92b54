"""The communicator over MPI: its verbs, each made of the parts that the other modules hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from mpi4py import MPI

from . import collectives, messages, point_to_point
from .agreement import Agreement, prepare
from .arrays import can_be_summed
from .base import CommunicatorBase
from .broadcast import bcast_parameters
from .collectives import Group
from .errors import CommunicationError, FinalizedError
from .gradients import mean_gradients
from .messages import OBJECT, Message
from .plans import Ground, Plan
from .reducer import Reducer
from .settings import Settings
from .topology import Topology
from .transport import Transport
from .transports.mpi import MpiTransport


@dataclass(frozen=True)
class _Resources:
    """What a communicator owns until it is finalized."""

    group: Group
    transport: Transport
    comms: tuple[MPI.Intracomm, ...]


class MpiCommunicator(CommunicatorBase):
    """A communicator over MPI, for NumPy arrays.

    Made by :func:`chainermn_comm.create_communicator`. Its settings (:meth:`set_config`) are
    ``allreduce_grad_dtype`` and ``batched_copy``. Arrays received are new ones; what a rank
    gives to itself is copied, but for ``bcast``, whose root gets its own array back.

    All collective methods raise on every rank: ``RankMismatchError`` when ranks call different
    operations or give arguments that don't fit; where one rank's argument is wrong in itself,
    ``TypeError`` or ``ValueError`` there and ``PeerError`` elsewhere. The communicator can be
    used on afterwards.
    """

    def __init__(
        self,
        mpi_comm: MPI.Intracomm,
        plan: Plan,
        settings: Settings,
        topology: Topology | None = None,
        owns_mpi_comm: bool = False,
    ) -> None:
        """Duplicate ``mpi_comm`` for this communicator's traffic (collective).

        Args:
            mpi_comm: an intracommunicator; the user's own traffic on it stays apart.
            plan: which way gradients go.
            settings: what the user chose.
            topology: imposed instead of asking MPI; the same on all ranks.
            owns_mpi_comm: whether ``finalize`` frees ``mpi_comm``.
        """
        own = mpi_comm.Dup()
        self._mpi_comm = mpi_comm
        self._plan = plan
        self._reducer: Reducer | None = None
        self._settings = settings
        self._process = os.getpid()
        self._rank, self._size = own.rank, own.size
        self._topology = topology or Topology.discover(own)
        # Users have all tags but the largest, which carries the messages of collectives.
        self._max_tag = int(own.Get_attr(MPI.TAG_UB) or 0) - 1
        self._resources: _Resources | None = _Resources(
            Group(own, Agreement(own), self._max_tag + 1),
            MpiTransport(own, self._max_tag + 1, settings.chunk_bytes),
            (own, mpi_comm) if owns_mpi_comm else (own,),
        )

    # Where this process is.

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

    def split(self, color: int, key: int) -> MpiCommunicator:
        group = self._group
        _, problem = prepare(lambda: self._check_split(color, key))
        group.agreement("split", problem=problem)
        part = MPI.Intracomm(group.comm.Split(color, key))
        topology = self._topology.restrict(part.allgather(self._rank))
        return MpiCommunicator(part, self._plan, self._settings, topology, owns_mpi_comm=True)

    # Arrays.

    def send(self, data: Any, dest: int, tag: int = 0) -> None:
        comm = self._peer(dest, tag, "dest")
        point_to_point.send(comm, messages.of_array(data, self._rank), dest, tag)

    def recv(self, source: int, tag: int = 0) -> Any:
        message = point_to_point.recv(self._peer(source, tag, "source"), source, tag)
        if message.kind == OBJECT:
            raise TypeError(
                f"rank {self._rank}: recv got an object that rank {source} sent with send_obj "
                "(now discarded); receive it with recv_obj"
            )
        return message.value()

    def bcast(self, data: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        # Messages are cut to what MPI can count anyway, so `max_buf_len` has nothing to limit.
        return collectives.bcast(self._group, "bcast", self._array(data), root).value()

    def gather(self, data: Any, root: int = 0) -> tuple[Any, ...] | None:
        found = collectives.gather(self._group, "gather", self._array(data), root)
        return None if found is None else tuple(message.value() for message in found)

    def alltoall(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        found = collectives.alltoall(self._group, "alltoall", self._each(xs, messages.of_array))
        return tuple(message.value() for message in found)

    def allreduce(self, data: Any) -> Any:
        return self._sum("allreduce", data, divisor=1)

    def allgather(self, x: Any) -> tuple[Any, ...]:
        found = collectives.allgather(self._group, "allgather", self._array(x))
        return tuple(message.value() for message in found)

    def scatter(self, xs: Sequence[Any] | None, root: int = 0) -> Any:
        make = self._each(xs, messages.of_array)
        return collectives.scatter(self._group, "scatter", make, root).value()

    # Objects.

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        comm = self._peer(dest, tag, "dest")
        point_to_point.send(comm, messages.of_object(obj), dest, tag)

    def recv_obj(self, source: int, tag: int = 0) -> Any:
        message = point_to_point.recv(self._peer(source, tag, "source"), source, tag)
        if message.kind != OBJECT:
            raise TypeError(
                f"rank {self._rank}: recv_obj got an array that rank {source} sent with send "
                "(now discarded); receive it with recv"
            )
        return message.value()

    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        make = self._object(obj)
        message = collectives.bcast(self._group, "bcast_obj", make, root)
        found = self._unpickled("bcast_obj", {} if self._rank == root else {root: message})
        return found.get(root, obj)

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        found = collectives.gather(self._group, "gather_obj", self._object(obj), root)
        objs = self._unpickled("gather_obj", dict(enumerate(found or ())))
        return list(objs.values()) if self._rank == root else None

    def allreduce_obj(self, obj: Any) -> Any:
        found = collectives.allgather(self._group, "allreduce_obj", self._object(obj))
        objs = self._unpickled("allreduce_obj", dict(enumerate(found)))
        return reduce(add, objs.values())

    def allgather_obj(self, obj: Any) -> list[Any]:
        found = collectives.allgather(self._group, "allgather_obj", self._object(obj))
        return list(self._unpickled("allgather_obj", dict(enumerate(found))).values())

    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        make = self._each(objs, lambda obj, _: messages.of_object(obj))
        message = collectives.scatter(self._group, "scatter_obj", make, root)
        return self._unpickled("scatter_obj", {root: message})[root]

    def alltoall_obj(self, objs: Sequence[Any]) -> list[Any]:
        make = self._each(objs, lambda obj, _: messages.of_object(obj))
        found = collectives.alltoall(self._group, "alltoall_obj", make)
        return list(self._unpickled("alltoall_obj", dict(enumerate(found))).values())

    # Models.

    def bcast_data(self, model: Any) -> None:
        group = self._group
        bcast_parameters(group, self._open.transport, model)

    def allreduce_grad(self, model: Any, zero_fill: bool = False) -> None:
        self.multi_node_mean_grad(model, zero_fill)

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
        """Replace each gradient by its mean over ranks (collective).

        Every rank gets the same bits. A gradient that can't be written to, or shares memory
        with another, is replaced by a new array. One that is missing (None) on all ranks is
        left alone. Beside the gradients this takes a few MiB, whatever the model's size.

        Args:
            model: anything with ``namedparams()``; each parameter's ``grad`` is changed.
            zero_fill: count a gradient that is missing here and present elsewhere as zeros;
                without it such a difference is an error.

        Raises:
            RankMismatchError: on all ranks, naming the first parameter that differs in name,
                shape, dtype or (without ``zero_fill``) presence of the gradient.
        """
        wire = self._settings.allreduce_grad_dtype
        mean_gradients(self._group, self._made_reducer(), model, wire, zero_fill)

    def multi_node_mean(self, sendbuf: Any, recvbuf: Any = None) -> Any:
        mean = self._sum("multi_node_mean", sendbuf, divisor=self._size)
        if recvbuf is None:
            return mean
        recvbuf[...] = mean
        return recvbuf

    # Settings and end of life.

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        """Change ``allreduce_grad_dtype`` or ``batched_copy``; the same on all ranks."""
        self._settings = self._settings.changed(name, value)

    def get_config(self, name: str | None = None) -> Any:
        settings = self._settings.as_dict()
        if name is None:
            return settings
        if name not in settings:
            raise ValueError(f"no setting {name!r}; there are {', '.join(settings)}")
        return settings[name]

    def finalize(self) -> None:
        """Free this communicator's MPI resources (all ranks should); later calls raise.

        The communicator that the user gave stays theirs. A second call does nothing, nor does
        one in a process that the rank forked.
        """
        resources, self._resources = self._resources, None
        if resources is None or MPI.Is_finalized() or os.getpid() != self._process:
            return
        if self._reducer is not None:
            self._reducer.close()
        resources.transport.close()
        for comm in resources.comms:
            comm.Free()

    # How the verbs are made.

    @property
    def _open(self) -> _Resources:
        if self._resources is None:
            raise FinalizedError(f"rank {self._rank}: the communicator has been finalized")
        if os.getpid() != self._process:
            raise CommunicationError(
                f"rank {self._rank}: a process that the rank forked can't communicate"
            )
        return self._resources

    @property
    def _group(self) -> Group:
        return self._open.group

    def _made_reducer(self) -> Reducer:
        # At first use, when the user has chosen a device and knows that there will be gradients.
        if self._reducer is None:
            ground = Ground(
                self._group.comm, self._topology, self._open.transport, self._settings.chunk_bytes
            )
            self._reducer = self._plan(ground)
        return self._reducer

    def _array(self, data: Any) -> Callable[[], Message]:
        return lambda: messages.of_array(data, self._rank)

    def _object(self, obj: Any) -> Callable[[], Message]:
        return lambda: messages.of_object(obj)

    def _each(
        self, values: Sequence[Any] | None, one: Callable[[Any, int], Message]
    ) -> Callable[[], list[Message]]:
        def make() -> list[Message]:
            if values is None or len(values) != self._size:
                raise ValueError(
                    f"rank {self._rank}: expected {self._size} values, one for each rank, got "
                    f"{None if values is None else len(values)}"
                )
            return [one(value, self._rank) for value in values]

        return make

    def _peer(self, rank: int, tag: int, name: str) -> MPI.Intracomm:
        group = self._group
        collectives.check_rank(group, rank, name)
        if rank == self._rank:
            raise ValueError(
                f"rank {self._rank}: {name} is this rank itself, which would wait for ever"
            )
        if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag <= self._max_tag:
            raise ValueError(
                f"rank {self._rank}: tag must be an integer from 0 to {self._max_tag}, got {tag!r}"
            )
        return group.comm

    def _check_split(self, color: int, key: int) -> None:
        for name, value in (("color", color), ("key", key)):
            if not isinstance(value, int) or (name == "color" and value < 0):
                raise ValueError(f"rank {self._rank}: {name} of split can't be {value!r}")

    def _unpickled(self, operation: str, found: dict[int, Message]) -> dict[int, Any]:
        """The objects; when one can't be unpickled on some rank, all ranks raise."""
        values, problem = prepare(lambda: {rank: m.value() for rank, m in found.items()})
        self._group.agreement(f"{operation}, unpickling", problem=problem)
        return values

    def _sum(self, operation: str, data: Any, divisor: int) -> Any:
        message, problem = prepare(lambda: self._summable(operation, data))
        view = [("array", array.dtype, array.shape) for array in message.arrays] if message else []
        self._group.agreement(operation, view, problem=problem)
        sums = []
        with np.errstate(over="raise" if divisor > 1 else "ignore", invalid="ignore"):
            for array in message.arrays:
                buffer = np.array(array, array.dtype.newbyteorder("="), order="C")
                self._open.transport.allreduce([buffer.reshape(-1)], divisor)
                sums.append(buffer.astype(array.dtype, copy=False))
        return Message(message.kind, tuple(sums), message.scalars).value()

    def _summable(self, operation: str, data: Any) -> Message:
        message = messages.of_array(data, self._rank)
        for array in message.arrays:
            if not can_be_summed(array.dtype):
                raise TypeError(f"rank {self._rank}: {operation} can't sum dtype {array.dtype}")
            if operation == "multi_node_mean" and array.dtype.kind in "biu":
                raise TypeError(
                    f"rank {self._rank}: multi_node_mean takes floats, got {array.dtype}"
                )
        return message

"""The communicator over MPI: each method is composed of a few calls of the folders below."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce, wraps
from operator import add
from typing import Any, TypeVar, cast

from mpi4py import MPI

from .communicator import (
    CommunicatorBase,
    check_metadata,
)
from .communicators import COMMUNICATORS
from .errors import (
    CommunicationError,
    FinalizedError,
    raise_together,
    share_failure,
)
from .faults import (
    abort_if_desynchronized,
    install_by_default,
    skip_finalize_in_forks,
)
from .gradients import MpiReducer, bcast_parameters, mean_gradients
from .messaging import (
    Backend,
    Handshake,
    ProcessGroup,
    collectives,
    messages,
    point_to_point,
)
from .mpi_start import require_running_mpi
from .negotiation import checked_intracomm, creating, negotiate_settings
from .numbers import as_integer, integer_between
from .observers import CallObserver
from .reducer import Reducer
from .resources import Resources, explained, free_unused, made_from
from .sums import mean_into, reduce_arrays
from .topology import Topology
from .trace import tracer
from .unreceived import say_unreceived_at_the_end
from .watchdog import Timeout, register

Method = TypeVar("Method", bound=Callable[..., Any])
# Colors and keys of a split are C ints.
LARGEST_INT = 2**31 - 1


def takes_second_as_root(method: Method) -> Method:
    """Decorate `bcast`, which alone can't tell whether ``max_buf_len`` was passed by name."""

    @wraps(method)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        if len(args) == 2 and "root" not in named:
            second = as_integer(args[1])
            if second is not None and 0 < second < self.size:
                named["root"] = second
        return method(self, *args, **named)

    return cast(Method, call)


class MpiCommunicator(CommunicatorBase):
    """A communicator over MPI, for NumPy and CuPy arrays.

    It is made by :func:`chainermn_comm.create_communicator`, or by its class, which
    raises the same errors. If a subclass defines ``multi_node_mean_grad`` or
    ``allreduce_grad``, optimizers call that method.

    Received arrays are new arrays. A rank's own part is copied, but the root of
    ``bcast`` may get its own array back.

    CuPy arrays travel in the order of the current streams, and arrive on the receiver's
    current device. If NCCL takes gradients, it also takes other arrays, but not those
    of ``send``: all ranks' arrays must be on GPUs, with dtypes that NCCL sums as NumPy
    does. Otherwise arrays are copied through host memory. If CUDA fails in such a copy,
    a collective method raises ``CommunicationError`` on all ranks; ``send`` raises it on
    its rank, and sends nothing.

    An exception in the middle of a call that moves data can't be raised on the other
    ranks, so it ends the job. Examples are lack of memory, a signal handler's exception,
    and a failure of CUDA or NCCL in a mean of gradients, which may come after the call.
    With ``CHAINERMN_FORCE_ABORT_ON_EXCEPTION=0`` the job goes on, and later calls on
    this rank raise ``CommunicationError``.

    A communicator serves one thread at a time: a call while another thread is in a call
    raises RuntimeError. The second thread needs a communicator of its own, made by
    :meth:`split`. Pickling raises TypeError.
    """

    #: The name that ``create_communicator`` knows, which decides its backends.
    communicator_name: str = "hierarchical"

    def __init__(
        self,
        mpi_comm: MPI.Intracomm | None = None,
        allreduce_grad_dtype: Any = None,
        batched_copy: bool = False,
        *,
        reproducible: bool = False,
        _topology: Topology | None = None,
        _timeout: Timeout | None = None,
    ) -> None:
        """Make a communicator of the ranks of ``mpi_comm`` (collective).

        ``allreduce_grad_dtype``, ``batched_copy``, ``reproducible`` and the errors are
        those of ``create_communicator``. Tests may impose a topology, the same on all
        ranks, and a time-out.
        """
        require_running_mpi()
        # This comes first, because an error of one rank below must not leave other
        # ranks waiting.
        install_by_default()
        comm = checked_intracomm(mpi_comm)
        with creating(comm, _timeout) as group:
            self._settings = negotiate_settings(
                group,
                self.communicator_name,
                allreduce_grad_dtype,
                batched_copy,
                reproducible,
                _timeout,
            )
            skip_finalize_in_forks()
            self._open(comm, _topology, Resources(comm))
        if self.communicator_name == "single_node" and self.inter_size > 1:
            self.finalize()
            raise ValueError(
                f"rank {self._rank}: communicator 'single_node' takes ranks of one "
                f"node, and these are on {self.inter_size}; use 'hierarchical'"
            )

    def _open(
        self,
        mpi_comm: MPI.Intracomm,
        topology: Topology | None,
        resources: Resources,
    ) -> None:
        """Duplicate ``mpi_comm`` for this communicator's traffic (collective).

        A ``topology``, the same on all ranks, is imposed instead of asking MPI.
        """
        own = mpi_comm.Dup()
        resources.callback(own.Free)
        resources.callback(free_unused, own)
        self._mpi_comm = mpi_comm
        self._resources = resources
        self._process = os.getpid()
        self._rank = own.rank
        self._size = own.size
        self._observer = self._observe(own)
        resources.callback(self._observer.release)
        self._topology = topology or Topology.discover(own)
        # Users have all tags except the three largest. One is for messages of the
        # library's own functions, two for collective calls. In Open MPI,
        # communicators that were split don't know the largest tag.
        self.reserved_tag = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0) - 2
        self._max_tag = self.reserved_tag - 1
        self._handshake = Handshake(own, self._observer)
        self._interruptions = self._handshake.interruptions
        group = ProcessGroup(
            comm=own,
            handshake=self._handshake,
            tag=self.reserved_tag + 1,
            topology=self._topology,
            abort=abort_if_desynchronized,
            settings=self._settings,
        )
        host, device = COMMUNICATORS[self.communicator_name](group)
        resources.callback(device.close)
        resources.callback(host.close)
        self._backends: tuple[Backend, ...] = host, device
        self._open_group: ProcessGroup | None = replace(group, host=host, device=device)
        resources.interruptions = self._interruptions
        resources.users.append(weakref.ref(self._open_group))
        resources.made = made_from(own)
        say_unreceived_at_the_end(
            own, self.reserved_tag, self._interruptions, resources
        )

    def _observe(self, own: MPI.Intracomm) -> CallObserver:
        """Return the observer of calls: the watchdog's, or the trace's, which forwards to it."""
        folder = self._settings.trace
        recorder = register(own, MPI.COMM_WORLD.rank) or CallObserver()
        if folder is None:
            return recorder
        return tracer.start(own, folder, recorder)

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
        return self._mpi_comm

    def split(self, color: int, key: int) -> MpiCommunicator:
        group = self._group
        who = f"rank {self._rank}"
        with group.call("split"), explained(group.handshake):
            with raise_together(group.handshake, "split"):
                color = integer_between(color, 0, LARGEST_INT, f"{who}: color of split")
                key = integer_between(
                    key, -LARGEST_INT, LARGEST_INT, f"{who}: key of split"
                )
            free_unused(group.comm)
            resources = Resources(group.comm)
            part = group.comm.Split(color, key)
            # A user may keep this, and not the communicator.
            given = MPI.Intracomm(part)
            kept = weakref.ref(given)
            resources.users.append(kept)
            resources.callback(lambda: (kept() or part).Free())
            topology = self._topology.restrict(part.allgather(self._rank))
            made = type(self).__new__(type(self))
            # Attributes of a subclass of the user's stay.
            vars(made).update(vars(self))
            made._open(given, topology, resources)
        return made

    # Arrays.

    def send(self, data: Any, dest: int, tag: int = 0) -> None:
        envelope = self._envelope(dest, tag, "dest", self._max_tag)
        message = messages.of_array_on_host(data, self._rank)
        point_to_point.send("send", message, envelope)

    def recv(self, source: int, tag: int = 0) -> Any:
        envelope = self._envelope(source, tag, "source", self._max_tag)
        return point_to_point.recv("recv", messages.ARRAYS, envelope)[1]

    def send_with_metadata(
        self,
        metadata: bytes,
        data: tuple[Any, ...],
        dest: int,
        tag: int = 0,
        label: str = "",
    ) -> None:
        check_metadata(metadata, data, self._rank)
        envelope = self._envelope(dest, tag, "dest", self.reserved_tag)
        message = messages.of_array_on_host(data, self._rank)
        message = message._replace(kind=messages.WITH_METADATA)
        point_to_point.send("send", message, envelope, label, metadata)

    def recv_with_metadata(
        self, source: int, tag: int = 0, label: str = ""
    ) -> tuple[bytes, tuple[Any, ...]]:
        envelope = self._envelope(source, tag, "source", self.reserved_tag)
        return point_to_point.recv(
            "recv", messages.ARRAYS_WITH_METADATA, envelope, label
        )

    @takes_second_as_root
    def bcast(self, data: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Return the ``data`` of ``root`` on every rank (collective), and raise as the base does.

        ``max_buf_len`` has no effect, with one exception: of two arguments that are
        passed by position, the second is the root if it is between 0 and ``size``, as in
        older communicators.
        """
        return collectives.bcast(self._group, "bcast", data, messages.of_arrays, root)

    def gather(self, data: Any, root: int = 0) -> tuple[Any, ...] | None:
        found = collectives.gather(
            self._group, "gather", data, messages.of_arrays, root
        )
        if found is None:
            return None
        return tuple(found)

    def alltoall(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            collectives.alltoall(self._group, "alltoall", xs, messages.of_arrays)
        )

    def allreduce(self, data: Any, op: str = "sum") -> Any:
        return reduce_arrays(self._group, "allreduce", data, op)

    def reduce_scatter(self, xs: Sequence[Any], op: str = "sum") -> Any:
        return reduce_arrays(self._group, "reduce_scatter", xs, op)

    def allgather(self, x: Any) -> tuple[Any, ...]:
        return tuple(
            collectives.allgather(self._group, "allgather", x, messages.of_arrays)
        )

    def handshake(
        self,
        operation: str,
        signature: Iterable[tuple[Any, ...]] = (),
        *,
        error: BaseException | None = None,
        payload: bytes = b"",
    ) -> list[bytes]:
        group = self._group
        try:
            with group.call(operation):
                if error is not None:
                    share_failure(group.handshake, operation, error)
                    raise error
                return group.handshake(operation, signature, payload, len(payload))
        finally:
            del error  # whose traceback refers to this frame: see `share_failure`

    @property
    def _last_failure(self) -> object | None:  # type: ignore[override]
        return self._handshake._last_failure

    def scatter(self, xs: Sequence[Any] | None, root: int = 0) -> Any:
        return collectives.scatter(self._group, "scatter", xs, messages.of_arrays, root)

    # Objects.

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        envelope = self._envelope(dest, tag, "dest", self._max_tag)
        point_to_point.send("send_obj", messages.of_object(obj), envelope)

    def recv_obj(self, source: int, tag: int = MPI.ANY_TAG) -> Any:
        """Receive the object that rank ``source`` sends with ``tag``, and raise as the base does.

        Without a ``tag``, receive the next message from this rank, which must be an
        object.
        """
        is_any = type(tag) is int and tag == MPI.ANY_TAG
        envelope = self._envelope(source, 0 if is_any else tag, "source", self._max_tag)
        if is_any:
            envelope = envelope._replace(tag=MPI.ANY_TAG)
        found = point_to_point.recv(
            "recv_obj", messages.OBJECTS, envelope, max_tag=self._max_tag
        )
        return found[1]

    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        return collectives.bcast(
            self._group, "bcast_obj", obj, messages.of_objects, root
        )

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        return collectives.gather(
            self._group, "gather_obj", obj, messages.of_objects, root
        )

    def allreduce_obj(self, obj: Any) -> Any:
        objs = collectives.allgather(
            self._group, "allreduce_obj", obj, messages.of_objects
        )
        try:
            return reduce(add, objs)
        except TypeError as error:  # on all ranks, since all have the same objects
            kinds = ", ".join(type(obj).__name__ for obj in objs)
            raise TypeError(
                f"rank {self._rank}: allreduce_obj can't add the ranks' objects ({kinds}): {error}"
            ) from error

    def allgather_obj(self, obj: Any) -> list[Any]:
        return collectives.allgather(
            self._group, "allgather_obj", obj, messages.of_objects
        )

    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        return collectives.scatter(
            self._group, "scatter_obj", objs, messages.of_objects, root
        )

    def alltoall_obj(self, objs: Sequence[Any]) -> list[Any]:
        return collectives.alltoall(
            self._group, "alltoall_obj", objs, messages.of_objects
        )

    # Models.

    def bcast_data(self, model: Any) -> None:
        group = self._group
        with group.call("bcast_data"):
            bcast_parameters(group, model)

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
        """Replace each gradient of ``model`` by its mean over ranks (collective).

        Gradients are real or complex floats, and all ranks get the same bits. A
        gradient that can't be written to, or shares memory with another gradient, is
        replaced by a new array. With ``zero_fill``, a gradient that is missing (None) on
        some ranks counts as zeros there; without ``zero_fill`` that is an error. A
        gradient that is missing on all ranks stays None. RankMismatchError names the
        first parameter that differs, or of which ranks hold different parts.

        The call's memory doesn't depend on the size of the model. Each rank takes up to
        16 MiB (32 MiB if there are more than 16 ranks). The ranks of a node share a
        window of 4 MiB per rank and 4 MiB more. Over several nodes the window has 4 MiB
        per rank and 5 MiB more; from 17 nodes on, 8 and 14 MiB; from 257 nodes on, 12
        and 21 MiB. A gradient that is replaced takes its new array and, if the old one
        isn't contiguous, a copy during the call.
        """
        group = self._group
        mean_gradients(group, MpiReducer(group, zero_fill), model)

    allreduce_grad = multi_node_mean_grad

    def make_reducer(
        self,
        zero_fill: bool = False,
        operation: str = "allreduce_grad",
        channel: CommunicatorBase | None = None,
    ) -> Reducer:
        # It may also be the one of another class or communicator.
        own: Any = self.multi_node_mean_grad
        is_ours = getattr(own, "__func__", None) is MpiCommunicator.multi_node_mean_grad
        is_ours = is_ours and own.__self__ is self
        # In this order: isinstance of an abstract class takes as long as all the rest.
        if is_ours and (channel is None or isinstance(channel, MpiCommunicator)):
            data_group = None if channel is None else channel._group
            return MpiReducer(self._group, zero_fill, operation, data_group)
        return super().make_reducer(zero_fill, operation, channel)

    def multi_node_mean(self, sendbuf: Any, recvbuf: Any = None) -> Any:
        """Return the mean of all ranks' arrays of floats ``sendbuf`` (collective).

        ``recvbuf`` is as in the base class. If ``sendbuf`` is None, the mean of all
        ranks' ``recvbuf`` overwrites ``recvbuf``.
        """
        if recvbuf is None:
            return reduce_arrays(self._group, "multi_node_mean", sendbuf)
        data = recvbuf if sendbuf is None else sendbuf
        return mean_into(self._group, data, recvbuf)

    # Settings and end of life.

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        """Give the setting ``name`` a ``value`` (not collective), and raise as the base does.

        Settings are ``allreduce_grad_dtype``, ``batched_copy`` and ``chunk_bytes``: the
        size in bytes of the chunks in which gradients travel, or None for the default
        (see :func:`chainermn_comm.create_communicator`). ``chunk_bytes`` can't be changed
        once arrays or gradients have been summed.
        """
        settings = self._settings.changed(name, value)
        made = any(
            [each.made_gradient_sum or each.made_array_sum for each in self._backends]
        )
        if made and settings.chunk_bytes != self._settings.chunk_bytes:
            raise ValueError(
                f"rank {self._rank}: {name} can't be changed any more, since arrays have been "
                "summed; change it right after making the communicator"
            )
        self._settings = settings
        for each in filter(
            None, (self._open_group, *[each.group for each in self._backends])
        ):
            each.settings = settings

    def get_config(self, name: str | None = None) -> Any:
        settings = self._settings.as_dict()
        if name is None:
            return settings
        if name not in settings:
            raise KeyError(f"no setting {name!r}; there are {', '.join(settings)}")
        return settings[name]

    def finalize(self) -> None:
        """Free this communicator's MPI resources (collective); later calls raise FinalizedError.

        A communicator that no rank uses any more is also freed without this call: when
        the communicator that it was split from is split again or finalized, or when the
        next communicator is created. The MPI communicator that the user passed stays
        theirs. A second call does nothing, and neither does a call in a process that the
        rank forked.
        """
        group = self._releasable
        if group is None:
            self._open_group = None
            return
        with group.call("finalize"):
            group.handshake("finalize")
            self._open_group = None
            group.is_finalized = True
            self._resources.close()
            self._backends = ()

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Finalize (collective); after an exception, release only what needs no other rank.

        Other ranks may not leave the block, and waiting for them would hide the error.
        So memory and NCCL's communicator are released. MPI's communicators and the
        node's window can be freed only by all ranks together, and stay until the process
        ends. A program that catches such errors and goes on should do so inside the
        block, or make no more than some hundred communicators.
        """
        if kind is None:
            self.finalize()
            return
        group = self._releasable
        self._open_group = None
        if group is None:
            return
        self._observer.release()
        group.is_finalized = True
        self._resources.interruptions = ["left by an exception"]
        group.host.release_local()
        group.device.release_local()
        self._backends = ()

    # Shared by the methods above.

    @property
    def _group(self) -> ProcessGroup:
        if self._interruptions:
            raise CommunicationError(
                f"rank {self._rank}: {self._interruptions[0]}, so the ranks are at different steps "
                "of it: end the job, or make a new communicator on all ranks"
            )
        if self._open_group is None:
            raise FinalizedError(
                f"rank {self._rank}: the communicator has been finalized"
            )
        if os.getpid() != self._process:
            raise CommunicationError(
                f"rank {self._rank}: a process that the rank forked can't communicate"
            )
        return self._open_group

    @property
    def _releasable(self) -> ProcessGroup | None:
        """The open group; None if releasing would wait for ever, or is another process's task."""
        is_forked = os.getpid() != self._process
        if self._interruptions or MPI.Is_finalized() or is_forked:
            return None
        return self._open_group

    def _envelope(
        self, rank: int, tag: int, name: str, max_tag: int
    ) -> point_to_point.Envelope:
        """Return the envelope of a message; raise unless there are such a rank and tag."""
        who = f"rank {self._rank}:"
        group = self._group
        other = integer_between(rank, 0, self._size - 1, f"{who} {name}")
        if other == self._rank:
            raise ValueError(
                f"{who} {name} is this rank itself, which would wait for ever"
            )
        number = integer_between(tag, 0, max_tag, f"{who} tag")
        return point_to_point.Envelope(group, other, number)

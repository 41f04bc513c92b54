"""The interface that every communicator has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, NoReturn, Self

import numpy as np

from .call_place import called_at
from .errors import (
    describe,
    mark_failed,
    peer_error,
    raise_together,
)
from .gpu import devices
from .numbers import (
    OPERATIONS,
    accumulator,
    as_array,
    check_operation,
    integer_between,
    one_for_each,
    wrong_kind,
)
from .reducer import Reducer
from .signatures import mismatch_error, view_of


class CommunicatorBase(ABC):
    """The interface of a communicator, which ChainerMN's wrappers use.

    The abstract members are those that ChainerMN 1.3 documents. A class that lacks one
    of them can't be instantiated. All other members are composed of abstract ones, and a
    subclass may replace them by faster ones.

    A *collective* method must be called by all ranks of the communicator, in the same
    order. Any other method involves only this rank, or one other rank.

    An *array* is an array of NumPy or CuPy with any shape, memory order and dtype but
    ``object``; a scalar; or a tuple or list of arrays, which arrives as a tuple. Arrays
    arrive with the shape and dtype that were sent. Shapes and dtypes may differ between
    ranks, unless a method says otherwise. Methods that end in ``_obj`` send any
    picklable object. A *model* is anything with ``namedparams()`` whose parameters have
    ``data`` and ``grad``. Names, shapes and dtypes of its parameters are equal on all
    ranks.

    ``root`` is a rank, the same on all ranks. ``source`` and ``dest`` are another rank.
    ``tag`` is an int from 0 on; a message is received with the tag with which it was
    sent.

    If an argument isn't as a method describes it, or pickling or unpickling fails, the
    rank raises TypeError, ValueError or pickle's error. In :meth:`send` and the like,
    nothing has been sent then. In a collective method all other ranks raise PeerError,
    which names the rank and its error. All ranks raise RankMismatchError if they call
    different methods; if roots, names, shapes or dtypes differ that must be equal; or if
    arrays are on GPUs on some ranks and in host memory on others. The text says where in
    the script each rank called. The communicator can be used afterwards. After
    :meth:`finalize`, a method that communicates raises FinalizedError.

    Attributes:
        reserved_tag: the tag of messages between the library's own functions, such as
            gradients that ``functions.recv`` sends back by :meth:`send_with_metadata`.
            :meth:`send` and :meth:`recv` of ``create_communicator``'s communicators
            refuse it. In other classes it is the largest tag that every MPI has, less
            one, and users must not use it.
    """

    reserved_tag: int = 32766
    # Stands for the last handshake if all ranks raised in it, for `raise_together`.
    _last_failure: object | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # ChainerMN 1.3 and Chainer 7 have different names for the mean of gradients.
        by_name = vars(cls)
        if "multi_node_mean_grad" not in by_name and "allreduce_grad" in by_name:
            cls.multi_node_mean_grad = _calling_allreduce_grad(cls)  # type: ignore[method-assign]
        elif "allreduce_grad" not in by_name and "multi_node_mean_grad" in by_name:
            cls.allreduce_grad = _calling_multi_node_mean_grad(cls)  # type: ignore[method-assign]

    # Rank and topology.

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's rank, from 0 to ``size - 1``."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks in the communicator."""

    @property
    @abstractmethod
    def intra_rank(self) -> int:
        """This rank's number among the ranks of its node, from 0 to ``intra_size - 1``."""

    @property
    @abstractmethod
    def inter_rank(self) -> int:
        """The number of this rank's node, from 0 to ``inter_size - 1``."""

    @property
    @abstractmethod
    def inter_size(self) -> int:
        """Number of nodes."""

    @property
    def intra_size(self) -> int:
        """Number of ranks on this node.

        Collective, and raises what :meth:`allgather_obj` raises. The communicators of
        ``create_communicator`` know the number, so there it is not collective.
        """
        return self.allgather_obj(self.inter_rank).count(self.inter_rank)

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator that the user passed; AttributeError if there is none."""
        raise AttributeError(f"{type(self).__name__} is not built on mpi4py")

    def split(self, color: int, key: int) -> CommunicatorBase:
        """Divide the communicator into groups (collective).

        If a subclass doesn't define this method, ``share_dataset`` and gradients that
        travel during computing raise NotImplementedError.

        Args:
            color: an int from 0 on; ranks that pass the same color form a group.
            key: an int that orders the ranks in the group. Ranks with equal keys keep
                their order.

        Returns:
            The communicator of this rank's group, with the settings of this
            communicator.

        Raises:
            CommunicationError: MPI has no room for another communicator; raised on all
                ranks.
        """
        raise NotImplementedError(f"{type(self).__name__} has no split")

    # Arrays.

    @abstractmethod
    def send(self, data: Any, dest: int, tag: int) -> None:
        """Send the array ``data`` to rank ``dest``, which calls :meth:`recv` with this ``tag``."""

    @abstractmethod
    def recv(self, source: int, tag: int) -> Any:
        """Return, as a new array, what rank ``source`` sends by :meth:`send` with this ``tag``.

        If the rank sent an object by :meth:`send_obj`, the object is discarded, and
        TypeError is raised.
        """

    def send_with_metadata(
        self,
        metadata: bytes,
        data: tuple[Any, ...],
        dest: int,
        tag: int,
        label: str = "",
    ) -> None:
        """Send arrays with metadata to rank ``dest``, which calls :meth:`recv_with_metadata`.

        This is cheaper than sending one more array.

        Args:
            metadata: bytes, which are copied: some kilobytes at most.
            data: a tuple of arrays, which may be empty.
            dest: the receiving rank.
            tag: a tag as for :meth:`send`, or ``reserved_tag``.
            label: the purpose of the call, for the watchdog's reports.
        """
        check_metadata(metadata, data, self.rank)
        self.send((np.frombuffer(metadata, np.uint8), *data), dest, tag)

    def recv_with_metadata(
        self, source: int, tag: int, label: str = ""
    ) -> tuple[bytes, tuple[Any, ...]]:
        """Receive what rank ``source`` sends by :meth:`send_with_metadata` with this ``tag``.

        ``label`` is the purpose of the call, for the watchdog's reports. If the rank
        sent something else, its message is discarded, and TypeError is raised.

        Returns:
            The metadata and a tuple of arrays.
        """
        found = self.recv(source, tag)
        head = found[0] if isinstance(found, tuple) and found else None
        if not isinstance(head, np.ndarray) or (head.dtype, head.ndim) != (np.uint8, 1):
            raise TypeError(
                f"rank {self.rank}: recv_with_metadata got a {type(found).__name__} that rank "
                f"{source} didn't send with send_with_metadata (now discarded); "
                "receive it with recv"
            )
        return head.tobytes(), found[1:]

    @abstractmethod
    def bcast(self, data: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Return the array ``data`` of ``root`` on every rank (collective).

        The ``data`` of other ranks is ignored. ``max_buf_len`` is accepted for scripts
        of ChainerMN 1.3, without effect: sizes have no limit.
        """

    @abstractmethod
    def gather(self, data: Any, root: int = 0) -> Any:
        """Collect every rank's array ``data`` at ``root`` (collective).

        Returns:
            At ``root`` a tuple of ``size`` arrays in rank order, root's own included;
            on other ranks None.
        """

    @abstractmethod
    def alltoall(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        """Send each of the ``size`` arrays ``xs[i]`` to rank ``i`` (collective).

        Returns:
            A tuple of ``size`` arrays, the i-th from rank ``i``.
        """

    @abstractmethod
    def allreduce(self, data: Any, op: str = "sum") -> Any:
        """Return the sum of all ranks' arrays, a new array on every rank (collective).

        Args:
            data: an array of numbers, with the same shape and dtype on all ranks. The
                sum of bools is a logical or. In a tuple or list, each array is summed
                by itself.
            op: the same on all ranks: ``"sum"``, or ``"max"`` or ``"min"`` for the
                largest or smallest of the ranks' numbers at each element. For these two,
                numbers are real, and the result is NaN if one of them is NaN.

        A subclass may call this method by ``super()``; it is composed of
        :meth:`alltoall`.
        """
        if isinstance(data, (tuple, list)):
            _compare_lengths(self, "allreduce", data)
            return tuple([self.reduce_scatter((x,) * self.size, op) for x in data])
        return self.reduce_scatter((data,) * self.size, op)

    def reduce_scatter(self, xs: Sequence[Any], op: str = "sum") -> Any:
        """Return the sum of all ranks' ``xs[rank]``, a new array (collective).

        Sums are taken in rank order, in float32 or wider, except by NCCL.

        Args:
            xs: ``size`` arrays of numbers, ``xs[i]`` for rank ``i``, none of them a
                tuple. Each ``xs[i]`` has the same shape and dtype on all ranks;
                different ``xs[i]`` may have different ones.
            op: as for :meth:`allreduce`.
        """
        with raise_together(self.handshake, "reduce_scatter") as call:
            row = one_for_each(xs, self.rank, self.size)
            arrays = [x if devices.on_gpu(x) else as_array(x, self.rank) for x in row]
            check_operation(self.rank, "reduce_scatter", op, arrays)
            specs = [("array", str(x.dtype), x.shape) for x in arrays]
            call.signature = [("op", op), *specs]
        rows = self.alltoall(arrays)
        wide = [row.astype(accumulator(row.dtype)) for row in rows]
        with np.errstate(all="ignore"):
            return reduce(OPERATIONS[op], wide).astype(rows[0].dtype, copy=False)

    def allgather(self, x: Any) -> tuple[Any, ...]:
        """Return on every rank a tuple of all ranks' arrays ``x`` in rank order (collective)."""
        return self.alltoall((x,) * self.size)

    def handshake(
        self,
        operation: str,
        signature: Iterable[tuple[Any, ...]] = (),
        *,
        error: BaseException | None = None,
        payload: bytes = b"",
    ) -> list[bytes]:
        """Check that all ranks mean the same call, and that none has failed (collective).

        This is the cheapest exchange among all ranks, to be made before or after a
        collective operation. A payload of up to 96 bytes takes no second exchange.

        Args:
            operation: the operation's name, for errors and the watchdog's reports.
            signature: facts that must be equal on all ranks: tuples of a name (a str)
                and its values, compared by ``repr``. NumPy's numbers count as Python's.
            error: the reason why this rank can't take part, or None. The rank raises
                this error, and the other ranks PeerError.
            payload: bytes for the other ranks, some kilobytes at most. Lengths may
                differ.

        Returns:
            The payloads of all ranks, in rank order.
        """
        rank = self.rank
        self._last_failure = None
        try:
            view = ""
            try:
                if not isinstance(payload, bytes):
                    raise wrong_kind(
                        f"the payload of {operation} must be bytes", payload, rank
                    )
                view = view_of(operation, signature)
            except BaseException as caught:
                error = error or caught
            rows = self.allgather_obj((view, error and describe(error, rank), payload))
            if error is not None:
                self._last_failure = mark_failed(error)
                raise error
        finally:
            # Its traceback refers to this frame: a cycle would keep all its frames alive.
            del error
        views, texts, payloads = zip(*rows, strict=True)
        if any(texts):
            failure: BaseException = peer_error(operation, rank, texts)
        elif len(set(views)) > 1:
            calls = self.allgather_obj(called_at(operation))
            failure = mismatch_error(operation, rank, views, calls)
        else:
            return list(payloads)
        self._last_failure = mark_failed(failure)
        raise failure

    def scatter(self, xs: Sequence[Any] | None, root: int = 0) -> Any:
        """Return on rank ``i`` the array ``xs[i]`` of the ``size`` arrays of ``root`` (collective).

        The ``xs`` of other ranks are ignored.
        """
        row = _checked_row(self, "scatter", xs, root)
        return self.bcast(tuple(row), root=root)[self.rank]

    # Objects.

    @abstractmethod
    def send_obj(self, obj: Any, dest: int, tag: int) -> None:
        """Send ``obj`` to rank ``dest``, which calls :meth:`recv_obj` with this ``tag``."""

    @abstractmethod
    def recv_obj(self, source: int, tag: int) -> Any:
        """Return the object that rank ``source`` sends by :meth:`send_obj` with this ``tag``.

        If the rank sent an array, the array is discarded, and TypeError is raised.
        """

    @abstractmethod
    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Return ``obj`` itself at ``root``, and a copy of it on other ranks (collective).

        The ``obj`` of other ranks is ignored. ``max_buf_len`` is as for :meth:`bcast`.
        """

    @abstractmethod
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Return at ``root`` every rank's ``obj`` in rank order, elsewhere None (collective)."""

    @abstractmethod
    def allreduce_obj(self, obj: Any) -> Any:
        """Return on every rank the sum (``+``) of all ranks' ``obj`` in rank order (collective)."""

    def allgather_obj(self, obj: Any) -> list[Any]:
        """Return on every rank a list of all ranks' ``obj`` in rank order (collective)."""
        everybody: list[Any] = self.bcast_obj(self.gather_obj(obj))
        return everybody

    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """Return on rank ``i`` the object ``objs[i]`` of ``root``'s ``size`` objects (collective).

        The ``objs`` of other ranks are ignored.
        """
        row = _checked_row(self, "scatter_obj", objs, root)
        return self.bcast_obj(row, root=root)[self.rank]

    def alltoall_obj(self, objs: Sequence[Any]) -> list[Any]:
        """Send each of the ``size`` objects ``objs[i]`` to rank ``i`` (collective).

        Returns:
            A list of ``size`` objects, the i-th from rank ``i``.
        """
        own = _checked_row(self, "alltoall_obj", objs)
        return [row[self.rank] for row in self.allgather_obj(own)]

    # Models.

    @abstractmethod
    def bcast_data(self, model: Any) -> None:
        """Overwrite the ``data`` of all parameters of ``model`` by rank 0's (collective)."""

    def broadcast_data(self, model: Any) -> None:
        """Do what ``bcast_data(model)`` does, and raise the same (collective)."""
        self.bcast_data(model)

    @abstractmethod
    def allreduce_grad(self, model: Any, zero_fill: bool = False) -> None:
        """Replace each gradient of ``model`` by its mean over ranks (collective).

        ``zero_fill`` is as for :meth:`multi_node_mean_grad`, which calls this method
        without it.
        """

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
        """Replace each gradient of ``model`` by its mean over ranks (collective).

        Each gradient is overwritten, or a new array takes its place. With ``zero_fill``
        a missing gradient (None) counts as zeros. Without ``zero_fill`` the same
        gradients must be missing on all ranks, and they stay None.
        """
        if zero_fill:
            _fill_in_zeros(self, model)
        self.allreduce_grad(model)

    def make_reducer(
        self,
        zero_fill: bool = False,
        operation: str = "allreduce_grad",
        channel: CommunicatorBase | None = None,
    ) -> Reducer:
        """Return a :class:`Reducer` for one mean of gradients in steps (not collective).

        Args:
            zero_fill: as for :meth:`multi_node_mean_grad`.
            operation: the purpose of the call, for errors and the watchdog's reports.
            channel: a communicator of the same ranks, made by :meth:`split`, on which
                gradients travel and which another thread may use. None for this
                communicator.
        """
        return Reducer(self, zero_fill, operation, channel)

    def multi_node_mean(self, sendbuf: Any, recvbuf: Any = None) -> Any:
        """Return the mean of all ranks' arrays, on every rank (collective).

        Args:
            sendbuf: an array of floats, with the same shape and dtype on all ranks, or
                None for the array in ``recvbuf``.
            recvbuf: an array of that shape in the same kind of memory, into which the
                mean is written, or None for a new array.
        """
        if isinstance(sendbuf, (tuple, list)):
            _compare_lengths(self, "multi_node_mean", sendbuf)
            return tuple([self.multi_node_mean(each) for each in sendbuf])
        with raise_together(self.handshake, "multi_node_mean"):
            array = as_array(recvbuf if sendbuf is None else sendbuf, self.rank)
            check_operation(self.rank, "multi_node_mean", "sum", [array], mean=True)
            # Wider than the array's numbers, so that a sum stays in range.
            terms = array.astype(np.result_type(array.dtype, np.float64))
            if recvbuf is not None:
                np.copyto(recvbuf, array)  # raises an error if the mean has no room
        mean = np.asarray(self.allreduce(terms) / self.size, array.dtype)
        if recvbuf is None:
            return mean
        recvbuf[...] = mean
        return recvbuf

    # Settings and end of life.

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        """Give the setting ``name`` a ``value``, the same on all ranks (not collective).

        The communicator's class says which settings exist. ValueError is raised if there
        is no such setting, or it can't have this value. ``kwargs`` are ignored.
        """
        raise ValueError(f"{type(self).__name__} has no setting {name!r}")

    def get_config(self, name: str | None = None) -> Any:
        """Return the value of the setting ``name``, or a dict of all settings if it is None.

        KeyError is raised if there is no such setting.
        """
        if name is None:
            return {}
        raise KeyError(f"{type(self).__name__} has no setting {name!r}")

    def finalize(self) -> None:  # noqa: B027  (optional: most subclasses own nothing)
        """Release what the communicator owns (collective); no other method works afterwards.

        Raises:
            RankMismatchError: some ranks call another method; raised on all ranks, and
                nothing is released.
        """

    # A copy of an object that holds a communicator uses the same communicator; the object
    # can't be pickled.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be pickled: a communicator belongs to one process; save "
            "the state of what holds it with chainer.serializers, or pickle that without it"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self.finalize()


def _checked_row(
    comm: CommunicatorBase, operation: str, values: Any, root: Any = None
) -> list[Any]:
    """Return the values of ``root``, or of each rank, once they are checked (collective)."""
    row: list[Any] = []
    with raise_together(comm.handshake, operation) as call:
        if root is not None:
            integer_between(root, 0, comm.size - 1, f"rank {comm.rank}: root")
        if root in (None, comm.rank):
            row = one_for_each(values, comm.rank, comm.size)
        call.signature = [("root", root)]
    return row


def _compare_lengths(comm: CommunicatorBase, operation: str, data: Any) -> None:
    comm.handshake(operation, [("arrays in a tuple", len(data))])


def _fill_in_zeros(comm: CommunicatorBase, model: Any) -> None:
    """Give the model the gradients that it lacks (collective)."""
    with raise_together(comm.handshake, "multi_node_mean_grad"):
        for _, param in model.namedparams():
            if param.data is not None and param.grad is None:
                param.grad = np.zeros_like(param.data)


# If a class defines only one of `allreduce_grad` and `multi_node_mean_grad`, these
# functions make the second. It calls the first method of that class, not of a subclass,
# so that a subclass's definition of the second may call it by `super()`.


def _calling_allreduce_grad(kind: Any) -> Any:
    def multi_node_mean_grad(self: Any, model: Any, zero_fill: bool = False) -> None:
        """Do what ``allreduce_grad(model)`` does, and raise the same (collective).

        With ``zero_fill``, missing gradients become zeros first.
        """
        if zero_fill:
            _fill_in_zeros(self, model)
        kind.allreduce_grad(self, model)

    return multi_node_mean_grad


def _calling_multi_node_mean_grad(kind: Any) -> Any:
    def allreduce_grad(self: Any, model: Any, zero_fill: bool = False) -> None:
        """Do what ``multi_node_mean_grad`` does, and raise the same (collective)."""
        kind.multi_node_mean_grad(self, model, zero_fill)

    return allreduce_grad


def check_metadata(metadata: Any, data: Any, rank: int) -> None:
    """Raise unless ``send_with_metadata`` can send these; the text names ``rank``."""
    method = "send_with_metadata"
    if not isinstance(metadata, bytes):
        raise wrong_kind(f"the metadata of {method} must be bytes", metadata, rank)
    if not isinstance(data, (tuple, list)):
        raise wrong_kind(f"{method} takes a tuple of arrays", data, rank)

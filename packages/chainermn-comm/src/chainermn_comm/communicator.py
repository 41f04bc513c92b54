"""The interface that every communicator has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import describe, raise_failure, raise_mismatch
from .watchdog import annotate

if TYPE_CHECKING:
    from typing_extensions import Self

# `send_noted` takes numbers from -NUMBERS on that are less than NUMBERS.
NUMBERS = 2**63


class CommunicatorBase(ABC):
    """What the wrappers of ChainerMN ask of a communicator.

    The abstract members are those that ChainerMN 1.3 documents; a class that lacks
    one cannot be instantiated. The others are composed from these, so a subclass
    need not write them, but may do so to be faster.

    A *collective* method must be called by all ranks of the communicator, in the
    same order. An *array* is anything that NumPy can put in a buffer: any shape,
    memory order and dtype but ``object``; a scalar; or a tuple or list of arrays,
    which arrives as a tuple. Methods ending in ``_obj`` carry any picklable object.
    """

    # Where this process is.

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this process, from 0 to ``size - 1``."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of processes in the communicator."""

    @property
    @abstractmethod
    def intra_rank(self) -> int:
        """Number of this process among those of its node."""

    @property
    @abstractmethod
    def inter_rank(self) -> int:
        """Number of this process's node among the nodes."""

    @property
    @abstractmethod
    def inter_size(self) -> int:
        """Number of nodes."""

    @property
    def intra_size(self) -> int:
        """Number of processes on this node (collective unless a subclass knows it)."""
        return self.allgather_obj(self.inter_rank).count(self.inter_rank)

    @property
    def mpi_comm(self) -> Any:
        """The mpi4py communicator that the user gave, for calls of their own."""
        raise AttributeError(f"{type(self).__name__} is not built on mpi4py")

    @abstractmethod
    def split(self, color: int, key: int) -> CommunicatorBase:
        """Divide the communicator into groups (collective).

        Args:
            color: the ranks that give the same number form a group.
            key: orders the ranks within the group; ties go by the old rank.

        Returns:
            The communicator of this rank's group, with this one's settings.
        """

    # Arrays.

    @abstractmethod
    def send(self, data: Any, dest: int, tag: int) -> None:
        """Send an array to rank ``dest``, which calls :meth:`recv` with the same ``tag``.

        Args:
            data: an array of any shape and numeric dtype, or a tuple of them.
            dest: the rank that receives it.
            tag: tells messages between the same ranks apart; from 0 on.
        """

    @abstractmethod
    def recv(self, source: int, tag: int) -> Any:
        """Receive what rank ``source`` sends with ``tag``.

        Args:
            source: the rank that calls :meth:`send`.
            tag: that it gives.

        Returns:
            A new array, of the shape and dtype that were sent; a tuple for a tuple.
        """

    def send_noted(
        self,
        note: bytes,
        data: tuple[Any, ...],
        dest: int,
        tag: int,
        label: str = "",
        number: int = 0,
    ) -> None:
        """Send arrays to :meth:`recv_noted`, with some bytes and a number that tell what they are.

        Cheaper than one array more. What differs from message to message is best put into the
        number: much is worked out once for messages of the same note and forms of arrays.

        Args:
            note: some kilobytes at most, since it is copied.
            data: a tuple of arrays, which may be empty, as for :meth:`send`.
            dest: the rank that receives it.
            tag: tells messages between the same ranks apart; from 0 on.
            label: what the call is made for, as the watchdog's reports name it.
            number: of 64 bits, signed.

        Raises:
            TypeError: the note is not bytes, ``data`` no tuple, or the number no int; nothing has
                been sent then.
            ValueError: the number is too large.
        """
        check_noted(note, data, number, self.rank)
        head = np.frombuffer(number.to_bytes(8, "little", signed=True) + note, np.uint8)
        with annotate(label) if label else nullcontext():
            self.send((head, *data), dest, tag)

    def recv_noted(
        self, source: int, tag: int, label: str = ""
    ) -> tuple[bytes, tuple[Any, ...], int]:
        """Receive what rank ``source`` sends with :meth:`send_noted` and ``tag``.

        Args:
            source: the rank that calls :meth:`send_noted`.
            tag: that it gives.
            label: what the call is made for, as the watchdog's reports name it.

        Returns:
            The note, a tuple of new arrays, and the number.

        Raises:
            TypeError: it sent something else, which is then discarded.
        """
        with annotate(label) if label else nullcontext():
            found = self.recv(source, tag)
        head = found[0] if isinstance(found, tuple) and found else None
        if (
            not isinstance(head, np.ndarray)
            or (head.dtype, head.ndim) != (np.uint8, 1)
            or len(head) < 8
        ):
            raise TypeError(
                f"rank {self.rank}: recv_noted got a {type(found).__name__} that rank {source} "
                "didn't send with send_noted (now discarded); receive it with recv"
            )
        written = head.tobytes()
        return written[8:], found[1:], int.from_bytes(written[:8], "little", signed=True)

    @abstractmethod
    def bcast(self, data: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Give ``root``'s array to every rank (collective).

        Args:
            data: at ``root`` an array of any shape and dtype; ignored elsewhere.
            max_buf_len: accepted for scripts of ChainerMN 1.3; sizes have no limit.
            root: the rank whose array it is.
        """

    @abstractmethod
    def gather(self, data: Any, root: int = 0) -> Any:
        """Collect every rank's array at ``root`` (collective).

        Args:
            data: this rank's array.
            root: the rank that gets them.

        Returns:
            At ``root`` a tuple of ``size`` arrays in rank order, its own included;
            None elsewhere. Shapes and dtypes may differ between ranks.
        """

    @abstractmethod
    def alltoall(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        """Send ``xs[i]`` to rank ``i``, for each ``i`` (collective).

        Args:
            xs: ``size`` arrays; shapes and dtypes may differ.

        Returns:
            ``size`` arrays, the i-th from rank ``i``.
        """

    @abstractmethod
    def allreduce(self, data: Any) -> Any:
        """The sum of all ranks' arrays, on every rank, in a new array (collective).

        Args:
            data: an array, of the same shape and dtype on all ranks.
        """

    def allgather(self, x: Any) -> tuple[Any, ...]:
        """Give every rank's array to every rank (collective).

        Args:
            x: this rank's array; shapes and dtypes may differ.

        Returns:
            ``size`` arrays in rank order.
        """
        return self.alltoall((x,) * self.size)

    def allgather_bytes(self, data: bytes, label: str = "allgather_bytes") -> list[bytes]:
        """Give every rank's bytes to every rank, in rank order (collective).

        The cheapest way to compare notes: nothing is pickled, and no array described.

        Args:
            data: some kilobytes at most; as many as each rank likes.
            label: what the call is made for, as errors and the watchdog's reports name it; the
                same on all ranks.
        """
        return self.handshake(label, payload=data)

    def handshake(
        self,
        operation: str,
        signature: Iterable[tuple[Any, ...]] = (),
        *,
        error: BaseException | None = None,
        payload: bytes = b"",
    ) -> list[bytes]:
        """Check that all ranks mean the same call, and that none has failed (collective).

        The cheapest exchange there is, for what precedes a collective operation or follows one:
        nothing is pickled, no array described, and a payload of up to 96 bytes travels along.

        Args:
            operation: the operation's name, as errors and the watchdog's reports give it.
            signature: what must be equal on all ranks: hashable tuples of a name and its values.
            error: why this rank can't take part; None if nothing is wrong.
            payload: bytes for the other ranks, some kilobytes at most; as many as each rank likes.

        Returns:
            Every rank's payload, in rank order, on every rank.

        Raises:
            BaseException: ``error`` itself, on the rank that has one.
            PeerError: on the other ranks; it names the ranks that failed and says why.
            RankMismatchError: on all ranks, when operations or signatures differ.
            TypeError: the payload isn't bytes; PeerError on the other ranks.
        """
        rank = self.rank
        error = error or check_payload(payload, operation, rank)
        text = error and describe(error, rank)
        try:
            rows = self.allgather_obj(([("operation", operation), *signature], text, payload))
        except Exception as failure:  # `error` may be why this rank's call doesn't fit the others'
            if error is None or failure is error:
                raise
            raise failure from error
        signatures, texts, payloads = zip(*rows, strict=True)
        if any(texts):
            raise_failure(operation, rank, error, texts)
        if any(repr(each) != repr(signatures[0]) for each in signatures):
            raise_mismatch(operation, rank, signatures)
        return list(payloads)

    def scatter(self, xs: Sequence[Any] | None, root: int = 0) -> Any:
        """Give ``xs[i]`` of ``root`` to rank ``i`` (collective).

        Args:
            xs: at ``root``, ``size`` arrays; ignored elsewhere.
            root: the rank whose arrays are dealt out.
        """
        mine = () if xs is None or self.rank != root else tuple(xs)
        parts = self.bcast(mine, root=root)
        if len(parts) != self.size:
            raise ValueError(
                f"rank {self.rank}: scatter needs {self.size} arrays at rank {root}, one for each "
                f"rank, got {len(parts)}"
            )
        return parts[self.rank]

    # Objects.

    @abstractmethod
    def send_obj(self, obj: Any, dest: int, tag: int) -> None:
        """Send an object to rank ``dest``, which calls :meth:`recv_obj` with the same ``tag``.

        Args:
            obj: anything that can be pickled.
            dest: the rank that receives it.
            tag: tells messages between the same ranks apart; from 0 on.
        """

    @abstractmethod
    def recv_obj(self, source: int, tag: int) -> Any:
        """Receive the object that rank ``source`` sends with ``tag``.

        Args:
            source: the rank that calls :meth:`send_obj`.
            tag: that it gives.
        """

    @abstractmethod
    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Give ``root``'s object to every rank (collective).

        Args:
            obj: at ``root`` anything that can be pickled; ignored elsewhere.
            max_buf_len: accepted for scripts of ChainerMN 1.3; sizes have no limit.
            root: the rank whose object it is.
        """

    @abstractmethod
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Collect every rank's object at ``root`` (collective).

        Args:
            obj: this rank's object, which can be pickled.
            root: the rank that gets them.

        Returns:
            At ``root`` a list of ``size`` objects in rank order; None elsewhere.
        """

    @abstractmethod
    def allreduce_obj(self, obj: Any) -> Any:
        """The sum (``+``) of all ranks' objects in rank order, on every rank (collective).

        Args:
            obj: this rank's object, which can be pickled and added.
        """

    def allgather_obj(self, obj: Any) -> list[Any]:
        """Give every rank's object to every rank, in rank order (collective).

        Args:
            obj: this rank's object, which can be pickled.
        """
        everybody: list[Any] = self.bcast_obj(self.gather_obj(obj))
        return everybody

    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """Give ``objs[i]`` of ``root`` to rank ``i`` (collective).

        Args:
            objs: at ``root``, ``size`` objects that can be pickled; ignored elsewhere.
            root: the rank whose objects are dealt out.
        """
        return self.bcast_obj(objs, root=root)[self.rank]

    def alltoall_obj(self, objs: Sequence[Any]) -> list[Any]:
        """Send ``objs[i]`` to rank ``i``, for each ``i`` (collective).

        Args:
            objs: ``size`` objects that can be pickled.

        Returns:
            ``size`` objects, the i-th from rank ``i``.
        """
        return [row[self.rank] for row in self.allgather_obj(objs)]

    # Models. A model is anything with `namedparams()`, whose parameters have `data` and `grad`.

    @abstractmethod
    def bcast_data(self, model: Any) -> None:
        """Give rank 0's parameters to every rank (collective).

        Args:
            model: whose parameters' ``data`` are changed; the same parameters on all ranks.
        """

    @abstractmethod
    def allreduce_grad(self, model: Any) -> None:
        """Replace each gradient by its mean over ranks (collective).

        Args:
            model: whose parameters' ``grad`` are changed; the same parameters on all ranks.
        """

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
        """Replace each gradient by its mean over ranks (collective).

        Args:
            model: the model; its parameters' ``grad`` are changed.
            zero_fill: count a missing gradient (None) as zeros. Without it, ranks must
                agree on which are missing, and those are left alone.
        """
        if zero_fill:
            for _, param in model.namedparams():
                if param.data is not None and param.grad is None:
                    param.grad = np.zeros_like(param.data)
        self.allreduce_grad(model)

    def multi_node_mean(self, sendbuf: Any, recvbuf: Any = None) -> Any:
        """The mean of all ranks' arrays (collective).

        Args:
            sendbuf: an array of the same shape and dtype on every rank.
            recvbuf: where the mean is written; None for a new array.
        """
        total = self.allreduce(sendbuf)
        if isinstance(total, tuple):
            return tuple(each / self.size for each in total)
        mean = np.asarray(total / self.size)
        if recvbuf is None:
            return mean
        recvbuf[...] = mean
        return recvbuf

    # Settings and end of life.

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        """Change a setting; see the communicator for what it knows.

        Args:
            name: of the setting.
            value: its new value, the same on all ranks.
            **kwargs: ignored.

        Raises:
            ValueError: there is no such setting, or it can't have that value.
        """
        raise ValueError(f"{type(self).__name__} has no setting {name!r}")

    def get_config(self, name: str | None = None) -> Any:
        """A setting's value, or all of them as a dict when ``name`` is None."""
        if name is None:
            return {}
        raise ValueError(f"{type(self).__name__} has no setting {name!r}")

    def finalize(self) -> None:  # noqa: B027  (optional: most subclasses own nothing)
        """Release what the communicator owns (collective); no other method works afterwards."""

    # It is a place among other processes: copies of what holds one talk through the same.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self.finalize()


def check_payload(payload: Any, operation: str, rank: int) -> TypeError | None:
    """The error of a handshake whose payload isn't bytes."""
    if isinstance(payload, bytes):
        return None
    kind = type(payload).__name__
    return TypeError(f"rank {rank}: the payload of {operation} must be bytes, got {kind}")


def check_noted(note: Any, data: Any, number: Any, rank: int) -> None:
    """Raise, with this rank's number, unless ``send_noted`` can send these."""
    if not isinstance(note, bytes):
        kind = type(note).__name__
        raise TypeError(f"rank {rank}: the note of send_noted must be bytes, got {kind}")
    if not isinstance(data, (tuple, list)):
        kind = type(data).__name__
        raise TypeError(f"rank {rank}: send_noted takes a tuple of arrays, got {kind}")
    if not isinstance(number, int):
        kind = type(number).__name__
        raise TypeError(f"rank {rank}: the number of send_noted must be an int, got {kind}")
    if not -NUMBERS <= number < NUMBERS:
        raise ValueError(f"rank {rank}: the number of send_noted must have 64 bits, got {number}")

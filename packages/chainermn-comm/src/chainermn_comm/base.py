"""The interface that every communicator has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Self


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
        """Send an array to rank ``dest``, which calls :meth:`recv` with the same ``tag``."""

    @abstractmethod
    def recv(self, source: int, tag: int) -> Any:
        """Receive what rank ``source`` sends with ``tag``, in a new array."""

    @abstractmethod
    def bcast(self, data: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Give ``root``'s array to every rank (collective); others' ``data`` is ignored."""

    @abstractmethod
    def gather(self, data: Any, root: int = 0) -> Any:
        """Collect every rank's array at ``root`` (collective).

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
        """The sum of all ranks' arrays, on every rank, in a new array (collective)."""

    def allgather(self, x: Any) -> tuple[Any, ...]:
        """Give every rank's array to every rank, in rank order (collective)."""
        return self.alltoall((x,) * self.size)

    def allgather_bytes(self, data: bytes, label: str = "allgather_bytes") -> list[bytes]:
        """Give every rank's bytes to every rank, in rank order (collective).

        The cheapest way to compare notes: nothing is pickled, and no array described.

        Args:
            data: some kilobytes at most; as many as each rank likes.
            label: what the call is made for, as errors and the watchdog's reports name it; the
                same on all ranks.
        """
        return [row.tobytes() for row in self.allgather(np.frombuffer(data, np.uint8))]

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
        """Send a picklable object to rank ``dest``, which calls :meth:`recv_obj`."""

    @abstractmethod
    def recv_obj(self, source: int, tag: int) -> Any:
        """Receive the object that rank ``source`` sends with ``tag``."""

    @abstractmethod
    def bcast_obj(self, obj: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        """Give ``root``'s object to every rank (collective); others' ``obj`` is ignored."""

    @abstractmethod
    def gather_obj(self, obj: Any, root: int = 0) -> list[Any] | None:
        """Collect every rank's object at ``root``, in rank order; None elsewhere (collective)."""

    @abstractmethod
    def allreduce_obj(self, obj: Any) -> Any:
        """The sum (``+``) of all ranks' objects in rank order, on every rank (collective)."""

    def allgather_obj(self, obj: Any) -> list[Any]:
        """Give every rank's object to every rank, in rank order (collective)."""
        return self.bcast_obj(self.gather_obj(obj))

    def scatter_obj(self, objs: Sequence[Any] | None, root: int = 0) -> Any:
        """Give ``objs[i]`` of ``root`` to rank ``i`` (collective)."""
        return self.bcast_obj(objs, root=root)[self.rank]

    def alltoall_obj(self, objs: Sequence[Any]) -> list[Any]:
        """Send ``objs[i]`` to rank ``i``, for each ``i`` (collective)."""
        return [row[self.rank] for row in self.allgather_obj(objs)]

    # Models. A model is anything with `namedparams()`, whose parameters have `data` and `grad`.

    @abstractmethod
    def bcast_data(self, model: Any) -> None:
        """Give rank 0's parameters to every rank (collective)."""

    @abstractmethod
    def allreduce_grad(self, model: Any) -> None:
        """Replace each gradient by its mean over ranks (collective)."""

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
        """Change a setting by name; see the communicator for what it knows."""
        raise ValueError(f"{type(self).__name__} has no setting {name!r}")

    def get_config(self, name: str | None = None) -> Any:
        """A setting's value, or all of them as a dict when ``name`` is None."""
        if name is None:
            return {}
        raise ValueError(f"{type(self).__name__} has no setting {name!r}")

    def finalize(self) -> None:  # noqa: B027  (optional: most subclasses own nothing)
        """Release what the communicator owns; no other method works afterwards."""

    # It is a place among other processes: copies of what holds one talk through the same.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self.finalize()

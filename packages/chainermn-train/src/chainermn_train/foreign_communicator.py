"""Communicators of no class of ours: doubles in tests, and wrappers of other communicators."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

from chainermn_comm import CommunicatorBase

_ALONE = SimpleNamespace(
    rank=0, size=1, intra_rank=0, intra_size=1, inter_rank=0, inter_size=1
)


def can_exchange_models(communicator: Any) -> bool:
    """Return whether it has what a multi-node optimizer called in Chainer 7, and is no class."""
    names = ("bcast_data", "multi_node_mean_grad"), ("bcast_data", "allreduce_grad")
    return not isinstance(communicator, type) and any(
        all(callable(getattr(communicator, name, None)) for name in each)
        for each in names
    )


class NoCommunicator:
    """Stands for None, with which an optimizer can be made, but not used."""

    def bcast_data(self, *_: Any) -> NoReturn:
        raise RuntimeError(
            "this multi-node optimizer was made with None for its communicator, so it can't "
            "update: give create_multi_node_optimizer what create_communicator() returns"
        )

    multi_node_mean_grad = bcast_data


class ForeignCommunicator(CommunicatorBase):
    """A communicator whose parameters and gradients travel by the methods of any object.

    If the object's ``handshake`` is that of a communicator, the object wraps one: all
    goes through it. Anything else, such as a mock, can't be relied on for more than
    ``bcast_data`` and ``multi_node_mean_grad`` (or ``allreduce_grad``). So this is the
    communicator of one rank, which agrees with itself: if there are others, they must
    do the same as this one.
    """

    rank = property(lambda self: self._place.rank)
    size = property(lambda self: self._place.size)
    intra_rank = property(lambda self: self._place.intra_rank)
    intra_size = property(lambda self: self._place.intra_size)
    inter_rank = property(lambda self: self._place.inter_rank)
    inter_size = property(lambda self: self._place.inter_size)

    def __init__(self, actual: Any) -> None:
        self._actual, self._place = actual, _ALONE
        handshake = getattr(actual, "handshake", None)
        if isinstance(getattr(handshake, "__self__", None), CommunicatorBase):
            self._place = actual
            for name in _METHODS:
                setattr(self, name, getattr(actual, name))

    # Models.

    def bcast_data(self, model: Any) -> None:
        self._actual.bcast_data(model)

    def allreduce_grad(self, model: Any, zero_fill: bool = False) -> None:
        self._actual.allreduce_grad(model)

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False) -> None:
        if hasattr(self._actual, "multi_node_mean_grad"):
            self._actual.multi_node_mean_grad(model, zero_fill)
        else:
            super().multi_node_mean_grad(model, zero_fill)

    # What one rank does alone.

    def split(self, color: int, key: int) -> CommunicatorBase:
        return self

    def send(self, data: Any, dest: int, tag: int) -> NoReturn:
        raise ValueError(f"{type(self._actual).__name__} has no other rank to send to")

    def recv(self, source: int, tag: int) -> NoReturn:
        raise ValueError(
            f"{type(self._actual).__name__} has no other rank to receive from"
        )

    def bcast(self, data: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        return data

    def gather(self, data: Any, root: int = 0) -> Any:
        return (data,)

    def alltoall(self, xs: Any) -> tuple[Any, ...]:
        return tuple(xs)

    def allreduce(self, data: Any, op: str = "sum") -> Any:
        return data

    def gather_obj(self, obj: Any, root: int = 0) -> list[Any]:
        return [obj]

    send_obj, recv_obj = send, recv  # type: ignore[assignment]
    bcast_obj, allreduce_obj = bcast, allreduce  # type: ignore[assignment]


# All but `make_reducer`, which would go past an overridden `multi_node_mean_grad`.
_METHODS = [
    name
    for name, value in vars(CommunicatorBase).items()
    if callable(value) and not name.startswith("_") and name != "make_reducer"
]

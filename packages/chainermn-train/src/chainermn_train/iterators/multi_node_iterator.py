"""The multi-node iterator: one rank's batches on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import chainer
from chainer.dataset import Iterator
from chainer.serializers import DictionarySerializer

from chainermn_comm import CommunicatorBase

from ..collective_errors import (
    raise_together,
    require_communicator,
    require_integer,
)
from .batch_message import pack, unpack
from .iterator_proxy import IteratorProxy, refuse_proxy
from .worker_processes import await_workers

_OPERATION = "multi-node iterator"
# The attributes of the master's iterator that travel with every batch, if it has them.
_SHARED = (
    "batch_size",
    "current_position",
    "epoch",
    "epoch_detail",
    "is_new_epoch",
    "previous_epoch_detail",
    "repeat",
)


def create_multi_node_iterator(
    actual_iterator: Any, communicator: CommunicatorBase, rank_master: int = 0
) -> MultiNodeIterator:
    """Make an iterator that gives one rank's batches to all ranks (collective).

    The iterator is for models whose ranks need the same examples, such as an encoder on
    one rank and a decoder on another. Each batch travels once, in one broadcast. If all
    ranks can read the data set, use :func:`create_synchronized_iterator`, which sends no
    batches.

    Args:
        actual_iterator: at ``rank_master`` any Chainer iterator; ignored on other ranks.
            Examples may have any picklable type: arrays of any shape and dtype, numbers,
            strings, and tuples, lists and dicts of these. A ``MultiprocessIterator``
            that shuffles needs a :class:`ResumableOrderSampler` to resume with the same
            batches.
        communicator: the ranks that share the batches.
        rank_master: the rank whose batches are shared, the *master*.

    Returns:
        An iterator that is used like ``actual_iterator``; see
        :class:`MultiNodeIterator`.

    Raises:
        TypeError, ValueError: an argument on this rank is not as above
            (:class:`~chainermn_comm.errors.PeerError` on the other ranks).
        RankMismatchError: ranks name different masters; raised on all ranks.
        TypeError: ``communicator`` is no communicator; raised at once on this rank
            alone.
    """
    communicator = require_communicator(communicator, "create_multi_node_iterator")
    with raise_together(communicator.handshake, "create_multi_node_iterator") as call:
        master = require_integer("rank_master", rank_master, 0, communicator.size - 1)
        refuse_proxy(actual_iterator)
        if communicator.rank == master and not isinstance(actual_iterator, Iterator):
            raise TypeError(
                "create_multi_node_iterator needs a Chainer iterator at rank_master, such as "
                f"chainer.iterators.SerialIterator, not {type(actual_iterator).__name__}"
            )
        call.signature = (("rank_master", master),)
    return MultiNodeIterator(actual_iterator, communicator, master)


class MultiNodeIterator(IteratorProxy):
    """An iterator that gives the batches of one rank, the master, to every rank.

    It is made by :func:`create_multi_node_iterator`, which checks the arguments;
    ``MultiNodeIterator(actual_iterator, communicator, rank_master)`` is collective, too.

    :meth:`next`, :meth:`reset` and :meth:`serialize` are collective: all ranks must
    call them in the same order. If one rank has an error, this rank raises it, and all
    others raise :class:`~chainermn_comm.errors.PeerError`. If ranks call different
    methods, all raise :class:`~chainermn_comm.errors.RankMismatchError`.

    ``epoch``, ``is_new_epoch``, ``epoch_detail``, ``previous_epoch_detail``,
    ``current_position``, ``repeat`` and ``batch_size`` are the master's on every rank.
    ``dataset`` has only a length on other ranks. All other attributes exist at the
    master alone, and are those of its iterator, for reading and for setting.

    A copy, shallow or deep, has the same communicator. Pickling the iterator raises
    TypeError.

    Attributes:
        actual: at the master, the actual iterator.
        communicator: the ranks that share the batches.
        rank_master: the rank whose batches are shared.
    """

    _OWN = IteratorProxy._OWN | {"rank_master"}

    def __init__(
        self, actual_iterator: Any, communicator: CommunicatorBase, rank_master: int
    ) -> None:
        if communicator.rank != rank_master:
            actual_iterator = RemoteIterator()
        super().__init__(actual_iterator, communicator)
        self.rank_master = rank_master
        self._broadcast_from_master("create_multi_node_iterator", lambda: None)

    def __next__(self) -> Any:
        """Return the master's next batch (collective).

        On ranks other than the master, the batch's arrays are parts of one buffer.

        Raises:
            StopIteration: the master's iterator has ended; raised on all ranks.
        """

        def make() -> tuple[Any, bool]:
            await_workers(self.actual)
            try:
                return next(self.actual), True
            except StopIteration:
                return None, False

        batch, goes_on = self._broadcast_from_master("next", make)
        if not goes_on:
            raise StopIteration
        return batch

    def reset(self) -> None:
        """Start again from the beginning (collective); errors are raised as the class says."""
        self._broadcast_from_master("reset", lambda: self.actual.reset())

    def serialize(self, serializer: Any) -> None:
        """Save or load the state (collective); errors are raised as the class says.

        Every rank saves the state of the master's iterator, so that training can resume
        from any rank's file. The state that the master loads counts.
        """
        loading = isinstance(serializer, chainer.Deserializer)

        def make() -> Any:
            record = DictionarySerializer()
            self.actual.serialize(serializer if loading else record)
            return record.target

        saved = self._broadcast_from_master(f"serialize (loading: {loading})", make)
        with raise_together(self.communicator.handshake, _OPERATION):
            for key, value in saved.items():
                # None comes as an array of objects, which not all serializers take.
                serializer(key, value.item() if value.dtype == object else value)

    def _broadcast_from_master(self, method: str, make: Callable[[], Any]) -> Any:
        """Return on every rank what ``make`` returns at the master; update the attributes there."""
        communicator = self.communicator
        master = self.rank_master
        with raise_together(communicator.handshake, _OPERATION) as call:
            call.signature = (("method", method),)
            if communicator.rank != master:
                attributes, value = unpack(*communicator.bcast(None, root=master))
                vars(self.actual).update(attributes)
                return value
            if communicator.size == 1:
                return make()
            message = None
            try:
                value = make()
                message = pack((_shared_attributes(self.actual, master), value))
                return value
            finally:
                if message is None:  # the other ranks wait for a message
                    message = pack((_shared_attributes(self.actual, master), None))
                communicator.bcast(message, root=master)


def _shared_attributes(iterator: Any, master: int) -> dict[str, Any]:
    """Return the attributes of the master's iterator that other ranks get."""
    attributes = {}
    for name in _SHARED:
        with contextlib.suppress(Exception):  # for example of an empty data set
            attributes[name] = getattr(iterator, name)
    with contextlib.suppress(Exception):
        attributes["dataset"] = RemoteDataset(len(iterator.dataset), master)
    return attributes


class RemoteIterator:
    """The master's iterator on another rank: the attributes that come with each batch."""

    def finalize(self) -> None:
        """Do nothing: there is nothing to release."""


@dataclass(eq=False, repr=False)
class RemoteDataset:
    """The master's data set on a rank that doesn't have it: nothing but a length."""

    _length: int
    _rank: int

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> NoReturn:
        raise RuntimeError(
            f"the examples are on rank {self._rank}; other ranks get them from the multi-node "
            "iterator, a batch at a time"
        )

"""An order sampler that deals one permutation of the whole data set over the ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from chainer.iterators import OrderSampler

from chainermn_comm import CommunicatorBase

from ..collective_errors import raise_together, require_communicator, require_integer
from .order_sampler import shuffled

_OPERATION = "DistributedOrderSampler"


class Place(NamedTuple):
    """How far all ranks together have come in an epoch: it says nothing of their number."""

    epoch: int
    seen: int  # examples, the first of the epoch's permutation
    examples: int  # of the data set


_PLACE_NUMBERS = len(Place._fields)


class PlacedOrder(np.ndarray):
    """As a sequence, the indices of an epoch's examples; as an array, these and a place.

    It is int64, of shape (n + 3,) for n examples. Iterators use it as a sequence, and
    save and load it as an array. So the place of an order, which orders of another
    epoch may equal, is wherever the order is.
    """

    @classmethod
    def of(cls, indices: np.ndarray, place: Place) -> PlacedOrder:
        """Return the order of these ``indices``, int64 of shape (n,), from ``place`` on."""
        return np.concatenate([indices, np.array(place)]).view(cls)

    @property
    def place(self) -> Place:
        """Where this order begins."""
        return Place(*np.asarray(self)[len(self) :].tolist())

    def __len__(self) -> int:
        return self.size - _PLACE_NUMBERS

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[: len(self)][index]

    # An array's would index what the sequence has not.
    __repr__ = __str__ = object.__repr__


class DistributedOrderSampler(OrderSampler):
    """Shuffles a data set that all ranks can reach, anew each epoch; each rank gets its part.

    It replaces :func:`scatter_dataset` where every rank has the whole data set: a file that all
    read, or what :func:`share_dataset` returns::

        dataset = chainermn.datasets.share_dataset(dataset, comm)
        sampler = chainermn.iterators.DistributedOrderSampler(comm, seed=0)
        iterator = SerialIterator(dataset, batch_size, order_sampler=sampler)

    An epoch's permutation follows from the seed and the epoch, and rank *r* of *n*
    takes each *n*-th example of it from the *r*-th on. So a batch of all ranks together
    is what a single rank would have with *n* times the batch size, and a job that goes
    on from a checkpoint with another number of ranks sees the rest of the epoch, each
    example once.

    It is for a ``SerialIterator``, ``MultithreadIterator`` or ``MultiprocessIterator``,
    whose epochs are then those of the whole data set. Making it is collective;
    iterators that use it aren't.

    Args:
        comm: the ranks.
        seed: an integer from 0 to 2**32 - 1, the same on all ranks and in the job that
            goes on.
        drop_last: what becomes of examples that are left over where the number of ranks
            doesn't divide that of examples. False: some ranks get one of the epoch's
            first examples again, so that all have as many. True: no rank gets them in
            this epoch, and there must be at least as many examples as ranks.

    Raises:
        TypeError, ValueError: an argument is not as above (PeerError on the other
            ranks).
        RankMismatchError: on all ranks, if arguments differ between ranks.
        TypeError: ``comm`` is not a communicator; raised at once on this rank only.
    """

    def __init__(
        self, comm: CommunicatorBase, seed: int = 0, *, drop_last: bool = False
    ) -> None:
        comm = require_communicator(comm, _OPERATION)
        with raise_together(comm.handshake, _OPERATION) as call:
            self.seed = require_integer("seed", seed, 0, 2**32 - 1)
            self.drop_last = bool(drop_last)
            call.signature = (("seed", self.seed), ("drop_last", self.drop_last))
        self._rank = comm.rank
        self._size = comm.size

    def __call__(self, current_order: np.ndarray, current_position: int) -> np.ndarray:
        """Return this rank's part of the next epoch's permutation: a sequence of indices.

        They are as many in each epoch, the number of examples divided by that of ranks
        (rounded down with ``drop_last``, else up). ``current_order`` is what it
        returned for the epoch that ends, or, as in a reset, that of all indices;
        ValueError if it is of another data set, seed or number of ranks, or if
        ``drop_last`` leaves no example. ``current_position`` has no influence.
        """
        if isinstance(current_order, PlacedOrder):
            place = current_order.place
            expected: np.ndarray = self.order_at(place)[0]
            following = Place(place.epoch + 1, 0, place.examples)
        else:
            expected = np.arange(len(current_order))
            following = Place(0, 0, len(current_order))
        if not np.array_equal(current_order, expected):
            raise ValueError(
                f"rank {self._rank}: the order of this iterator isn't one that "
                f"DistributedOrderSampler(seed={self.seed}, drop_last={self.drop_last}) gives to a "
                f"rank of {self._size} for {following.examples} examples: was it loaded from a "
                "snapshot of another data set, seed or number of ranks? A multi-node checkpointer "
                "can go on with another number of ranks"
            )
        return self.order_at(following)[0]

    def order_at(self, place: Place) -> tuple[PlacedOrder, int]:
        """Return this rank's order from a ``place`` on, and where its next example stands.

        Not collective.

        Raises:
            ValueError: ``drop_last`` leaves no example.
        """
        length = self._share(place.examples)
        if self.drop_last and not length:
            raise ValueError(
                f"rank {self._rank}: DistributedOrderSampler(drop_last=True) leaves nothing of "
                f"{place.examples} examples for {self._size} ranks: give at least one example a "
                "rank, or drop_last=False, which gives some examples to several ranks"
            )
        left = self._share(place.examples - place.seen)
        permutation = shuffled([self.seed, place.epoch], place.examples)
        # What lies before the position has been seen: an iterator's orders are equally
        # long.
        first = place.seen + self._rank - (length - left) * self._size
        indices = first + self._size * np.arange(length)
        order = permutation[indices % max(1, place.examples)]
        return PlacedOrder.of(order, place), length - left

    def advanced(self, start: Place, position: int, size: int) -> Place:
        """Return the place of ``size`` ranks at this ``position`` in an order from ``start`` on.

        Not collective; raises nothing.
        """
        rest = start.examples - start.seen
        before = self._share(start.examples, size) - self._share(rest, size)
        place = start._replace(seen=start.seen + (position - before) * size)
        is_over = place.seen > 0 and not self._share(place.examples - place.seen)
        return Place(place.epoch + 1, 0, place.examples) if is_over else place

    def _share(self, count: int, size: int | None = None) -> int:
        size = size or self._size
        return count // size if self.drop_last else -(-count // size)

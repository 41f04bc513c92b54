"""An order sampler that deals one permutation of the whole data set over the ranks."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np
from chainer.iterators import OrderSampler

from chainermn_comm import CommunicatorBase

from ..collective_errors import SharedFailure, require_communicator, require_integer
from .order_sampler import shuffled

_OPERATION = "DistributedOrderSampler"
# Orders that are looked for by their epoch, where no checkpoint said which they are.
_MOST_EPOCHS = 1000


class Place(NamedTuple):
    """How far all ranks together have come in an epoch: it says nothing of their number."""

    epoch: int
    seen: int  # examples, the first of the epoch's permutation
    examples: int  # of the data set


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
    whose epochs are then those of the whole data set, and one iterator at a time.
    Making it is collective; iterators that use it aren't.

    Args:
        comm: the ranks.
        seed: an integer from 0 to 2**32 - 1, the same on all ranks and in the job that
            goes on.
        drop_last: what becomes of examples that are left over where the number of ranks
            doesn't divide that of examples. False: some ranks get one of the epoch's
            first examples again, so that all have as many. True: no rank gets them in
            this epoch.

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
        with SharedFailure(comm.handshake, _OPERATION):
            self.seed = require_integer("seed", seed, 0, 2**32 - 1)
            self.drop_last = bool(drop_last)
        comm.handshake(_OPERATION, (("seed", self.seed), ("drop_last", self.drop_last)))
        self._rank, self._size = comm.rank, comm.size
        self._examples: int | None = None
        # Of the orders that it has returned, by their checksums: each follows from a
        # place.
        self._places: dict[bytes, Place] = {}

    def __call__(self, current_order: np.ndarray, current_position: int) -> np.ndarray:
        """Return this rank's part of the next epoch's permutation: indices, int64.

        They are as many in each epoch, the number of examples divided by that of ranks
        (rounded down with ``drop_last``, else up). ``current_order`` is what it
        returned for the epoch that ends, or, as in a reset, that of the indices;
        ValueError if it is of another data set, seed or number of ranks.
        ``current_position`` has no influence.
        """
        count = len(current_order)
        # A part of few examples may be 0, 1, and so on, too.
        is_reset = np.array_equal(current_order, np.arange(count))
        if self._examples is None or (
            is_reset and _digest(current_order) not in self._places
        ):
            self._examples = count
            return self.order_at(Place(0, 0, count))[0]
        place = self._find(current_order)
        return self.order_at(Place(place.epoch + 1, 0, self._examples))[0]

    def order_at(self, place: Place) -> tuple[np.ndarray, int]:
        """Return this rank's order, int64, from a ``place`` on, and where its next example stands.

        Not collective; raises nothing.
        """
        self._examples = place.examples
        length, left = (
            self._share(place.examples),
            self._share(place.examples - place.seen),
        )
        permutation = shuffled([self.seed, place.epoch], place.examples)
        # What lies before the position has been seen: an iterator's orders are equally
        # long.
        first = place.seen + self._rank - (length - left) * self._size
        indices = first + self._size * np.arange(length)
        order = permutation[indices % max(1, place.examples)]
        self._places[_digest(order)] = place
        return order, length - left

    def start_of(self, iterator: Any) -> Place:
        """Return where the order of an ``iterator`` that uses this begins (not collective).

        Raises:
            ValueError: as a call does.
        """
        # It has no public name; 7.8.1 is Chainer's last release.
        return self._find(iterator._state.order)

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

    def _find(self, order: np.ndarray) -> Place:
        """Return where an order begins that this returned, or another one like it elsewhere."""
        digest = _digest(order)
        if digest not in self._places and self._examples is not None:
            epochs = (
                range(_MOST_EPOCHS) if len(order) == self._share(self._examples) else ()
            )
            for epoch in epochs:
                if digest == _digest(self.order_at(Place(epoch, 0, self._examples))[0]):
                    break
        if digest not in self._places:
            raise ValueError(
                f"rank {self._rank}: the order of this iterator isn't one that "
                f"DistributedOrderSampler(seed={self.seed}, drop_last={self.drop_last}) gives to a "
                f"rank of {self._size} for {self._examples} examples: was it loaded from a "
                "snapshot of another data set, seed or number of ranks? A multi-node checkpointer "
                "can go on with another number of ranks"
            )
        return self._places[digest]


def _digest(order: np.ndarray) -> bytes:
    return hashlib.sha256(np.asarray(order, np.int64).tobytes()).digest()

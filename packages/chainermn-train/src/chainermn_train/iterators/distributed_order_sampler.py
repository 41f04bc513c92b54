"""An order sampler that divides one permutation of the whole data set among ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from chainer.iterators import OrderSampler

from chainermn_comm import CommunicatorBase

from ..collective_errors import raise_together, require_communicator, require_integer
from .order_sampler import shuffled

_OPERATION = "DistributedOrderSampler"


class EpochPosition(NamedTuple):
    """How far all ranks together have come in an epoch, for any number of ranks."""

    epoch: int
    seen: int  # number of examples, the first ones of the epoch's permutation
    examples: int  # of the data set


_NUMBERS = len(EpochPosition._fields)


class DistributedOrder(np.ndarray):
    """As a sequence, the indices of an epoch's examples; as an array, these and a position.

    The array is int64, of shape (n + 3,) for n examples. Iterators use an order as a
    sequence, and save and load it as an array. Orders of two epochs may be equal, so
    the position goes wherever the order goes.
    """

    @property
    def position(self) -> EpochPosition:
        """The position in the epoch at which this order begins."""
        return EpochPosition(*np.asarray(self)[len(self) :].tolist())

    def __len__(self) -> int:
        return self.size - _NUMBERS

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[: len(self)][index]

    # The array's own methods would index the sequence beyond its end.
    __repr__ = __str__ = object.__repr__


class DistributedOrderSampler(OrderSampler):
    """Shuffles a data set that every rank has, anew each epoch, and gives each rank a part.

    It replaces :func:`scatter_dataset` if every rank has the whole data set, such as a
    file that all ranks read, or the result of :func:`share_dataset`::

        dataset = chainermn.datasets.share_dataset(dataset, comm)
        sampler = chainermn.iterators.DistributedOrderSampler(comm, seed=0)
        iterator = SerialIterator(dataset, batch_size, order_sampler=sampler)

    The permutation of an epoch follows from the seed and the epoch. Rank *r* of *n*
    takes each *n*-th of its examples, from the *r*-th on. So the batches of all ranks
    together are the batch of a single rank with *n* times the batch size. A job that
    goes on from a checkpoint with another number of ranks sees each remaining example
    of the epoch once.

    The sampler works with a ``SerialIterator``, ``MultithreadIterator`` or
    ``MultiprocessIterator``, whose epochs are then epochs of the whole data set. Making
    it is collective; using it isn't.

    Args:
        comm: the ranks.
        seed: an integer from 0 to 2**32 - 1, the same on all ranks and in resumed runs.
        drop_last: what happens to remaining examples if the number of ranks doesn't
            divide the number of examples. False: some ranks get one of the epoch's first
            examples again, so that all ranks have equally many. True: no rank gets the
            remaining examples in this epoch; there must be at least as many examples as
            ranks.

    Raises:
        TypeError, ValueError: an argument is not as above (PeerError on the other
            ranks).
        RankMismatchError: arguments differ between ranks; raised on all ranks.
        TypeError: ``comm`` is no communicator; raised at once on this rank alone.
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
        """Return this rank's part of the next epoch's permutation, a sequence of indices.

        Its length is the number of examples divided by the number of ranks, rounded
        down with ``drop_last`` and up without. ``current_order`` is the result for the
        epoch that ends, or for a reset 0, 1, 2, and so on. ``current_position`` has no
        influence.

        Raises:
            ValueError: ``current_order`` belongs to another data set, seed or number of
                ranks, or ``drop_last`` leaves no example.
        """
        begin = EpochPosition(-1, 0, len(current_order))  # before the first epoch
        expected = np.arange(begin.examples)
        if isinstance(current_order, DistributedOrder):
            begin = current_order.position
            expected = self.order_at(begin)[0]
        if not np.array_equal(current_order, expected):
            raise ValueError(
                f"rank {self._rank}: the order of this iterator isn't one that "
                f"DistributedOrderSampler(seed={self.seed}, drop_last={self.drop_last}) gives to a "
                f"rank of {self._size} for {begin.examples} examples: was it loaded from a "
                "snapshot of another data set, seed or number of ranks? A multi-node checkpointer "
                "can go on with another number of ranks"
            )
        following = EpochPosition(begin.epoch + 1, 0, begin.examples)
        return self.order_at(following)[0]

    def order_at(self, begin: EpochPosition) -> tuple[DistributedOrder, int]:
        """Return this rank's order from ``begin`` on, and the index of its next example.

        The method is not collective.

        Raises:
            ValueError: ``drop_last`` leaves no example.
        """
        length = self._share(begin.examples, self._size)
        if self.drop_last and not length:
            raise ValueError(
                f"rank {self._rank}: DistributedOrderSampler(drop_last=True) leaves nothing of "
                f"{begin.examples} examples for {self._size} ranks: give at least one example a "
                "rank, or drop_last=False, which gives some examples to several ranks"
            )
        start = self._start(begin, self._size)
        permutation = shuffled([self.seed, begin.epoch], begin.examples)
        # An iterator's orders must be equally long, so this order begins with examples that
        # have been seen.
        first = begin.seen + self._rank - start * self._size
        indices = first + self._size * np.arange(length)
        chosen = permutation[indices % max(1, begin.examples)]
        order = np.concatenate([chosen, np.array(begin)]).view(DistributedOrder)
        return order, start

    def advanced(self, begin: EpochPosition, index: int, size: int) -> EpochPosition:
        """Return the position of ``size`` ranks at this ``index`` of orders from ``begin`` on.

        The method is not collective and raises nothing.
        """
        seen = begin.seen + (index - self._start(begin, size)) * size
        if seen > 0 and not self._share(begin.examples - seen, self._size):
            return EpochPosition(begin.epoch + 1, 0, begin.examples)
        return begin._replace(seen=seen)

    def _start(self, begin: EpochPosition, size: int) -> int:
        """Return at which index of the orders of ``size`` ranks the next example stands."""
        left = self._share(begin.examples - begin.seen, size)
        return self._share(begin.examples, size) - left

    def _share(self, count: int, size: int) -> int:
        """Return how many of ``count`` examples each of ``size`` ranks gets."""
        if self.drop_last:
            return count // size
        return -(-count // size)

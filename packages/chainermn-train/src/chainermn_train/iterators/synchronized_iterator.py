"""The synchronized iterator: each rank reads its own data set, all in the same order."""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import chainer
import numpy as np
from chainer.dataset import Iterator
from chainer.iterators import ShuffleOrderSampler
from chainer.serializers import DictionarySerializer

from chainermn_comm import CommunicatorBase

from ..collective_errors import (
    allgather_checked,
    raise_together,
    require_communicator,
)
from .iterator_proxy import IteratorProxy, refuse_proxy
from .order_sampler import SEED_NUMBERS, ResumableOrderSampler
from .worker_processes import await_workers

_OPERATION = "synchronized iterator"


def create_synchronized_iterator(
    actual_iterator: Any, communicator: CommunicatorBase
) -> SynchronizedIterator:
    """Make all ranks' iterators visit examples in the same order (collective).

    No batch is sent. Every rank reads its own data set, which should have the same
    examples on all ranks, or the parts of these examples that the rank needs. The
    iterator starts again from the beginning. If it shuffles, the first order is drawn
    from rank 0's generator, and further orders follow as with a
    :class:`ResumableOrderSampler`, which replaces the iterator's own order sampler.

    Args:
        actual_iterator: a ``SerialIterator``, ``MultiprocessIterator`` or
            ``MultithreadIterator`` of Chainer, shuffling or not. Classes may differ
            between ranks.
        communicator: the ranks that iterate together.

    Returns:
        An iterator that is used like ``actual_iterator``; see
        :class:`SynchronizedIterator`.

    Raises:
        TypeError: the iterator is none of the above (PeerError on the other ranks).
        RankMismatchError: the numbers of examples, batch sizes or ``repeat`` differ
            between ranks, or only some ranks shuffle; raised on all ranks.
        TypeError: ``communicator`` is no communicator; raised at once on this rank
            alone.

    Warns:
        RuntimeWarning: on rank 0, if an order sampler of the user's own is replaced.
    """
    communicator = require_communicator(communicator, "create_synchronized_iterator")
    with raise_together(communicator.handshake, "create_synchronized_iterator") as call:
        call.signature = _terms(actual_iterator).items()
    sampler = actual_iterator.order_sampler
    is_known = type(sampler) in (
        type(None),
        ShuffleOrderSampler,
        ResumableOrderSampler,
    )
    if communicator.rank == 0 and not is_known:
        warnings.warn(
            f"the synchronized iterator shuffles, and doesn't use {type(sampler).__name__}, "
            "its order sampler, which may differ between ranks; if it is the same function on "
            "all ranks, use the iterator as it is",
            RuntimeWarning,
            stacklevel=2,
        )

    def draw_seed() -> Any:  # on all ranks, so that their generators stay in step
        draw = sampler if is_known else ShuffleOrderSampler()
        return draw and draw(np.arange(SEED_NUMBERS), 0).tolist()

    seeds = allgather_checked(communicator, _OPERATION, draw_seed)
    with raise_together(communicator.handshake, _OPERATION):
        if sampler is not None:
            actual_iterator.order_sampler = ResumableOrderSampler(seeds[0])
            # The thread that fetches ahead has its own reference. Chainer 7.8.1 is the
            # last release.
            loop = getattr(actual_iterator, "_prefetch_loop", None)
            if loop is not None:
                loop.order_sampler = actual_iterator.order_sampler
        actual_iterator.reset()
    return SynchronizedIterator(actual_iterator, communicator)


class SynchronizedIterator(IteratorProxy):
    """An iterator that visits examples in the same order on all ranks.

    It is made by :func:`create_synchronized_iterator`, which is collective and checks
    the iterators; the class itself does neither.

    Ranks must make the same calls. Only loading from a snapshot is collective, because
    it compares the ranks' states. An error while a batch is made stays on its rank.

    All other attributes are those of the actual iterator, for reading and for setting. A
    copy, shallow or deep, has the same communicator. Pickling raises TypeError.

    Attributes:
        actual: this rank's actual iterator.
        communicator: the ranks that iterate together.
    """

    def __next__(self) -> Any:
        """Return the next batch of this rank's data set (not collective)."""
        await_workers(self.actual)
        return next(self.actual)

    def serialize(self, serializer: Any) -> None:
        """Save or load the state (loading is collective).

        Raises:
            RankMismatchError: the loaded states differ between ranks; raised on all
                ranks.
        """
        if not isinstance(serializer, chainer.Deserializer):
            self.actual.serialize(serializer)
            return
        operation = "loading a synchronized iterator"
        with raise_together(self.communicator.handshake, operation) as call:
            self.actual.serialize(serializer)
            record = DictionarySerializer()
            self.actual.serialize(record)
            # The order is too long for a signature, so its checksum is compared.
            call.signature = [
                (key, zlib.crc32(value) if value.ndim else str(value))
                for key, value in record.target.items()
            ]


def _terms(iterator: Any) -> dict[str, Any]:
    """Check the iterator; return the facts that must be equal on all ranks for equal orders."""
    refuse_proxy(iterator)
    if not isinstance(iterator, Iterator) or not hasattr(iterator, "order_sampler"):
        raise TypeError(
            "create_synchronized_iterator needs a SerialIterator, MultiprocessIterator or "
            f"MultithreadIterator of Chainer, not {type(iterator).__name__}"
        )
    return {
        "number of examples": len(iterator.dataset),
        "batch_size": int(iterator.batch_size),
        "repeat": bool(iterator.repeat),
        "shuffles": iterator.order_sampler is not None,
    }

"""The positions of iterators in an epoch, and the same positions on other numbers of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..trainer_introspection import iterators_of
from .distributed_order_sampler import DistributedOrderSampler, EpochPosition
from .iterator_proxy import IteratorProxy


def distributed_sampler(iterator: Any) -> DistributedOrderSampler | None:
    """Return the iterator's sampler, if it divides one permutation among all ranks."""
    sampler = getattr(iterator, "order_sampler", None)
    return sampler if isinstance(sampler, DistributedOrderSampler) else None


def epoch_positions(target: Any) -> dict[str, tuple[int, EpochPosition | None]]:
    """Return the number of examples of each iterator of a trainer, and where its order begins.

    Only an order that is divided among ranks has such a beginning; for others it is None.
    """
    found = {}
    for name, iterator in iterators_of(target).items():
        dataset: Any = getattr(iterator, "dataset", None)
        if hasattr(dataset, "__len__"):
            begin = None
            if distributed_sampler(iterator) is not None:
                # The order has no public name; 7.8.1 is Chainer's last release.
                begin = iterator._state.order.position
            found[name] = len(dataset), begin
    return found


def move_iterator(
    iterator: Any,
    name: str,
    path: str,
    states: Sequence[Mapping[str, Any]],
    state: dict[str, Any],
    positions: Mapping[str, Any],
) -> list[str]:
    """Write to ``state`` the position of all ranks in an epoch; return what begins anew.

    The names of entries begin with ``path``. ``states`` are the ranks' saved states, and
    ``positions`` their :func:`epoch_positions`.
    """
    length = len(iterator.dataset)
    count, begin = positions.get(name, (length, None))
    if count == length and isinstance(iterator, IteratorProxy):
        return []  # all ranks see the same examples in the same order
    order_key = path + ("order" if path + "order" in state else "_order")
    steps = [int(each[path + "current_position"]) for each in states]
    epoch = int(states[0][path + "epoch"])
    anew = []
    dealer = distributed_sampler(iterator)
    if dealer is not None and begin is not None:
        start = EpochPosition(*begin)
        # Ranks may be at several positions, because some ranks had more batches.
        here = dealer.advanced(start, max(steps), len(states))
        state[order_key], position = dealer.order_at(here)
        epoch += here.epoch - start.epoch
    else:
        sampler = getattr(iterator, "order_sampler", None)
        if sampler is not None:
            state[order_key] = sampler(np.arange(length), 0)
            length = len(state[order_key])
            anew.append(f"the order of examples of iterator {name!r}")
        # The iterator continues as far in the epoch as rank 0 was in its own.
        position = round(steps[0] * length / max(1, count))
    state[path + "epoch"] = np.array(epoch)
    state[path + "current_position"] = np.array(position)
    return anew

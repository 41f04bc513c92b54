"""How far iterators are, and how far on another number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..trainer_introspection import iterators_of
from .distributed_order_sampler import DistributedOrderSampler, Place
from .multi_node_iterator import MultiNodeIterator
from .order_sampler import ResumableOrderSampler
from .synchronized_iterator import SynchronizedIterator


def shared_order(iterator: Any) -> DistributedOrderSampler | None:
    """Return the sampler, if it deals one permutation over all ranks."""
    sampler = getattr(iterator, "order_sampler", None)
    return sampler if isinstance(sampler, DistributedOrderSampler) else None


def places_of(target: Any) -> dict[str, tuple[int, Place | None]]:
    """Return of a trainer's iterators the number of examples, and where a shared order begins."""
    found = {}
    for name, iterator in iterators_of(target).items():
        dataset: Any = getattr(iterator, "dataset", None)
        if hasattr(dataset, "__len__"):
            start = None
            if shared_order(iterator) is not None:
                # It has no public name; 7.8.1 is Chainer's last release.
                start = iterator._state.order.place
            found[name] = len(dataset), start
    return found


def place(
    iterator: Any,
    name: str,
    path: str,
    states: Sequence[Mapping[str, Any]],
    state: dict[str, Any],
    places: Mapping[str, Any],
) -> list[str]:
    """Set an iterator's entries of a ``state``, which begin with ``path``; return what begins anew.

    ``states`` are those that ranks have saved, and ``places`` the :func:`places_of`
    them.
    """
    order_key = path + ("order" if path + "order" in state else "_order")
    sampler, shared = getattr(iterator, "order_sampler", None), shared_order(iterator)
    count, start = places.get(name, (len(iterator.dataset), None))
    orders = [np.asarray(each.get(order_key)) for each in states]
    # A single rank has one order, too, but several that begin with it may mean to have
    # their own.
    is_one = type(sampler) is ResumableOrderSampler and len(orders) > 1
    is_one = is_one and len({each.tobytes() for each in orders}) == 1
    is_one = is_one or isinstance(iterator, MultiNodeIterator | SynchronizedIterator)
    if is_one and count == len(iterator.dataset):
        return []
    positions = [int(np.asarray(each[path + "current_position"])) for each in states]
    epoch, anew = int(np.asarray(state[path + "epoch"])), list[str]()
    if shared is not None and start is not None:
        # Ranks may be at several places, as some had more batches.
        at = shared.advanced(Place(*start), max(positions), len(states))
        state[order_key], position = shared.order_at(at)
        epoch += at.epoch - Place(*start).epoch
    else:
        # As much of an epoch as the ranks had seen of theirs, on average.
        epochs = [int(np.asarray(each[path + "epoch"])) for each in states]
        sizes = [len(each) if each.ndim else count for each in orders]
        seen = zip(epochs, positions, sizes, strict=True)
        detail = sum(it + min(1.0, at / max(1, of)) for it, at, of in seen) / len(
            states
        )
        epoch, position = math.floor(detail), round(detail % 1 * len(iterator.dataset))
        if sampler is not None:
            state[order_key] = order = sampler(np.arange(len(iterator.dataset)), 0)
            position = round(detail % 1 * len(order))
            anew = [f"the order of examples of iterator {name!r}"]
    state[path + "epoch"], state[path + "current_position"] = (
        np.array(epoch),
        np.array(position),
    )
    return anew

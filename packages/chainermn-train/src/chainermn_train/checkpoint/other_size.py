"""The state of a job goes on with another number of ranks: what that means for each rank's own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..iterators import DistributedOrderSampler
from ..iterators.distributed_order_sampler import Place
from ..trainer_introspection import iterators_of, updater_of
from .shards import RESERVED_PREFIX, State

RANDOM, PLACES = RESERVED_PREFIX + "random", RESERVED_PREFIX + "places"
# Of a multi-node optimizer: the gradients of updates since its last step.
_GROUP = "chainermn/group/"


def places(target: Any) -> np.ndarray:
    """Return where the iterators' orders begin, of those that share an order, as a text."""
    samplers = shared_orders(target)
    found = {name: each.start_of(iterator) for name, (iterator, each) in samplers.items()}
    return np.array(json.dumps(found))


def recall_places(target: Any, state: State) -> None:
    """Let the samplers know the orders in a state that as many ranks have saved."""
    begun = json.loads(str(state.get(PLACES, "{}")))
    for name, (_, sampler) in shared_orders(target).items():
        if name in begun:
            sampler.order_at(Place(*begun[name]))


def shared_orders(target: Any) -> dict[str, tuple[Any, DistributedOrderSampler]]:
    """Return by name the iterators that deal one order over the ranks, and their samplers."""
    found = {}
    for name, iterator in iterators_of(target).items():
        sampler = getattr(iterator, "order_sampler", None)
        if isinstance(sampler, DistributedOrderSampler):
            found[name] = iterator, sampler
    return found


def adapt(target: Any, states: Sequence[State], rank: int, size: int) -> tuple[State, list[str]]:
    """Return the state of a rank of another job, and what begins anew in it, in words.

    ``states`` are those of all ranks that there were. What was a rank's own, the statistics of
    batch normalization, say, goes to the rank of its number, and where there are more, again from
    rank 0 on.
    """
    state = dict(states[rank % len(states)])
    anew = ["random numbers"] if state.pop(RANDOM, None) is not None else []
    prefix = "" if target is updater_of(target) else "updater/"
    for name, iterator in iterators_of(target).items():
        own = f"{prefix}iterator:{name}/"
        if own + "current_position" in state:
            anew += _place_iterator(iterator, name, own, state, states)
    for name in [name for name in state if name.endswith(_GROUP + "calls")]:
        _add_up(name.removesuffix("calls"), state, states, rank)
        state[name.removesuffix("calls") + "rank"] = np.array(rank)
        state[name.removesuffix("calls") + "size"] = np.array(size)
    return state, anew


def _place_iterator(
    iterator: Any, name: str, own: str, state: State, states: Sequence[State]
) -> list[str]:
    """Set the iterator's entries of a state; return what begins anew."""
    order_key = own + ("order" if own + "order" in state else "_order")
    sampler = getattr(iterator, "order_sampler", None)
    begun = json.loads(str(state.get(PLACES, "{}")))
    positions = [int(np.asarray(each[own + "current_position"])) for each in states]
    epoch, anew = int(np.asarray(state[own + "epoch"])), list[str]()
    if isinstance(sampler, DistributedOrderSampler) and name in begun:
        start = Place(*begun[name])
        place = sampler.advanced(start, positions[0], len(states))
        order, position = sampler.order_at(place)
        epoch += place.epoch - start.epoch
        state[order_key] = order
    else:
        # As much of an epoch as the ranks had seen of theirs, on average.
        details = [_epoch_detail(each, own, order_key, iterator) for each in states]
        detail, count = sum(details) / len(details), len(iterator.dataset)
        epoch, position = math.floor(detail), round(detail % 1 * count)
        if sampler is not None:
            state[order_key] = order = sampler(np.arange(count), 0)
            position = round(detail % 1 * len(order))
            anew = [f"the order of examples of iterator {name!r}"]
    state[own + "epoch"], state[own + "current_position"] = np.array(epoch), np.array(position)
    return anew


def _epoch_detail(state: State, own: str, order_key: str, iterator: Any) -> float:
    epoch, position, order = (
        state.get(key) for key in (own + "epoch", own + "current_position", order_key)
    )
    count = len(iterator.dataset) if order is None or not order.ndim else len(order)
    return int(np.asarray(epoch)) + min(1.0, int(np.asarray(position)) / max(1, count))


def _add_up(group: str, state: State, states: Sequence[State], rank: int) -> None:
    """Give rank 0 all gradients that ranks had added up, and the others none."""
    names, terms = group + "sums/names", 0
    totals: dict[str, np.ndarray] = {}
    scale: float | None = None
    for each in states:
        terms += int(np.asarray(each[group + "terms"]))
        heads = json.loads(np.asarray(each[names]).tobytes())
        for number, (name, scale_there, is_present) in enumerate(heads):
            if not is_present:
                continue
            scale = scale_there if scale is None else scale
            array = np.asarray(each[f"{group}sums/{number}"]) * ((scale or 1) / (scale_there or 1))
            totals[name] = totals[name] + array if name in totals else array
    for key in [key for key in state if key.startswith(group + "sums/")]:
        del state[key]
    own = totals if rank == 0 else {}
    text = json.dumps([[name, scale, True] for name in own])
    state[names] = np.frombuffer(text.encode(), np.uint8)
    for number, array in enumerate(own.values()):
        state[f"{group}sums/{number}"] = array
    state[group + "terms"] = np.array(terms if rank == 0 else 0)

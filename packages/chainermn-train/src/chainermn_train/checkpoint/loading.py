"""A state is loaded, also on another number of ranks: what that means for each rank's own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from ..iterators import DistributedOrderSampler, Place
from ..optimizers import MultiNodeOptimizer, group_of_rank, is_same_on_all
from ..trainer_introspection import iterators_of, updater_of
from .shards import RESERVED_PREFIX, State
from .state_dict import StateError, load_state_dict

RANDOM, PLACES = RESERVED_PREFIX + "random", RESERVED_PREFIX + "places"
# Of a multi-node optimizer: the gradients of updates since its last step.
_GROUP = "chainermn/group/"


def places(target: Any) -> np.ndarray:
    """Return of iterators how many examples they have, and where a shared order begins, as text."""
    found = {}
    for name, iterator in iterators_of(target).items():
        dataset: Any = getattr(iterator, "dataset", None)
        if hasattr(dataset, "__len__"):
            sampler = _shared_order(iterator)
            found[name] = len(dataset), sampler and sampler.start_of(iterator)
    return np.array(json.dumps(found))


def load(
    target: Any, states: Sequence[State], size: int, own: int, comm: CommunicatorBase
) -> list[str]:
    """Load what ``size`` ranks have saved, here that of rank ``own``; return what begins anew.

    StateError, with a part of it loaded, if it doesn't fit.
    """
    state, anew = states[own], list[str]()
    if size != comm.size:
        state, anew = _adapt(target, state, states, comm.rank, comm.size)
    load_state_dict(target, state)
    iterators = iterators_of(target)
    for name, (count, start) in _places_in(state).items() if size == comm.size else ():
        iterator = iterators.get(name)
        if iterator is not None and count != len(iterator.dataset):
            raise StateError(
                f"iterator {name!r} has {len(iterator.dataset)} examples here and had {count} "
                "there: its place in them belongs to a rank, and the data are divided differently "
                "now. Go on with the same data, or save the model and the optimizer alone"
            )
        if start is not None and (sampler := _shared_order(iterator)) is not None:
            sampler.order_at(Place(*start))  # which it knows from now on
    return anew


def mark_synchronized_if_equal(comm: CommunicatorBase, target: Any, optimizer: Any = None) -> None:
    """Spare optimizers their broadcast, if ranks have the same (collective)."""
    updater = updater_of(target)
    optimizers = [] if updater is None else list(updater.get_all_optimizers().values())
    if all(optimizer is not each for each in optimizers):
        optimizers.append(optimizer)
    for each in optimizers:
        if isinstance(each, MultiNodeOptimizer) and each.target and is_same_on_all(comm, each):
            each.assume_synchronized()


def _places_in(state: State) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(state.get(PLACES, "{}")))
    return found


def _shared_order(iterator: Any) -> DistributedOrderSampler | None:
    sampler = getattr(iterator, "order_sampler", None)
    return sampler if isinstance(sampler, DistributedOrderSampler) else None


def _adapt(
    target: Any, state: State, states: Sequence[State], rank: int, size: int
) -> tuple[State, list[str]]:
    """Return a rank's state for another number of ranks, and what begins anew in it, in words.

    ``states`` are those of all ranks that there were.
    """
    state = dict(state)
    anew = ["random numbers"] if state.pop(RANDOM, None) is not None else []
    prefix = "" if target is updater_of(target) else "updater/"
    for name, iterator in iterators_of(target).items():
        own = f"{prefix}iterator:{name}/"
        if own + "current_position" in state:
            anew += _place_iterator(iterator, name, own, state, states)
    for name in [name for name in state if name.endswith(_GROUP + "calls")]:
        path = name.removesuffix("calls")
        for key in [key for key in state if key.startswith(path)]:
            del state[key]
        state.update(group_of_rank(path, states, rank, size))
    return state, anew


def _place_iterator(
    iterator: Any, name: str, own: str, state: State, states: Sequence[State]
) -> list[str]:
    """Set the iterator's entries of a state; return what begins anew."""
    order_key = own + ("order" if own + "order" in state else "_order")
    sampler, shared = getattr(iterator, "order_sampler", None), _shared_order(iterator)
    count, start = _places_in(state).get(name, (len(iterator.dataset), None))
    positions = [int(np.asarray(each[own + "current_position"])) for each in states]
    epoch, anew = int(np.asarray(state[own + "epoch"])), list[str]()
    if shared is not None and start is not None:
        place = shared.advanced(Place(*start), positions[0], len(states))
        state[order_key], position = shared.order_at(place)
        epoch += place.epoch - Place(*start).epoch
    else:
        # As much of an epoch as the ranks had seen of theirs, on average.
        epochs = [int(np.asarray(each[own + "epoch"])) for each in states]
        orders = [each.get(order_key) for each in states]
        sizes = [count if each is None or not each.ndim else len(each) for each in orders]
        seen = zip(epochs, positions, sizes, strict=True)
        detail = sum(it + min(1.0, at / max(1, of)) for it, at, of in seen) / len(states)
        epoch, position = math.floor(detail), round(detail % 1 * len(iterator.dataset))
        if sampler is not None:
            state[order_key] = order = sampler(np.arange(len(iterator.dataset)), 0)
            position = round(detail % 1 * len(order))
            anew = [f"the order of examples of iterator {name!r}"]
    state[own + "epoch"], state[own + "current_position"] = np.array(epoch), np.array(position)
    return anew

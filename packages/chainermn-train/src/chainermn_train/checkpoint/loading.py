"""A state is loaded, also on another number of ranks: what that means for each rank's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from ..iterators import place, places_of, shared_order
from ..optimizers import MultiNodeOptimizer, accumulation_of_rank, is_same_on_all
from ..trainer_introspection import iterators_of, updater_of
from .shards import RESERVED_PREFIX, State
from .state_dict import StateError, load_state_dict

RANDOM, PLACES = RESERVED_PREFIX + "random", RESERVED_PREFIX + "places"
# Of a multi-node optimizer: the gradients of updates since its last step.
_GROUP = "chainermn/group/"


def places(target: Any) -> np.ndarray:
    """Return, as text, where the iterators' orders begin: see :func:`places_of`."""
    return np.array(json.dumps(places_of(target)))


def load(
    target: Any, states: Sequence[State], size: int, own: int, comm: CommunicatorBase
) -> list[str]:
    """Load what ``size`` ranks have saved, here that of rank ``own``; return what begins anew.

    StateError, with a part of it loaded, if it doesn't fit.
    """
    state, anew = states[own], list[str]()
    if size != comm.size:
        state, anew = _adapt(target, state, states, comm.rank, comm.size)
    elif own != comm.rank:  # its order of a shared permutation isn't this rank's
        state = dict(state)
        for name, iterator in iterators_of(target).items():
            if shared_order(iterator) is not None:
                place(
                    iterator,
                    name,
                    _path_of(target, name),
                    states,
                    state,
                    _places_in(state),
                )
    load_state_dict(target, state)
    iterators = iterators_of(target)
    for name, (count, _) in _places_in(state).items() if size == comm.size else ():
        iterator = iterators.get(name)
        if iterator is not None and count != len(iterator.dataset):
            raise StateError(
                f"iterator {name!r} has {len(iterator.dataset)} examples here and had {count} "
                "there: its place in them belongs to a rank, and the data are divided differently "
                "now. Go on with the same data, or save the model and the optimizer alone"
            )
    return anew


def mark_synchronized_if_equal(
    comm: CommunicatorBase, target: Any, optimizer: Any = None
) -> None:
    """Spare optimizers their broadcast, if ranks have the same (collective)."""
    updater = updater_of(target)
    optimizers = [] if updater is None else list(updater.get_all_optimizers().values())
    if all(optimizer is not each for each in optimizers):
        optimizers.append(optimizer)
    for each in optimizers:
        if (
            isinstance(each, MultiNodeOptimizer)
            and each.target
            and is_same_on_all(comm, each)
        ):
            each.assume_synchronized()


def _places_in(state: State) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(str(state.get(PLACES, "{}")))
    return found


def _path_of(target: Any, name: str) -> str:
    return f"{'' if target is updater_of(target) else 'updater/'}iterator:{name}/"


def _adapt(
    target: Any, state: State, states: Sequence[State], rank: int, size: int
) -> tuple[State, list[str]]:
    """Return a rank's state for another number of ranks, and what begins anew in it, in words.

    ``states`` are those of all ranks that there were.
    """
    state = dict(state)
    anew = ["random numbers"] if state.pop(RANDOM, None) is not None else []
    for name, iterator in iterators_of(target).items():
        own = _path_of(target, name)
        if own + "current_position" in state:
            anew += place(iterator, name, own, states, state, _places_in(state))
    for name in [name for name in state if name.endswith(_GROUP + "calls")]:
        path = name.removesuffix("calls")
        for key in [key for key in state if key.startswith(path)]:
            del state[key]
        state.update(accumulation_of_rank(path, states, rank, size))
    return state, anew

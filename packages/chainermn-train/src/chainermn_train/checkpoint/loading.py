"""A rank's state is saved, and loaded, also on another number of ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from ..iterators import distributed_sampler, epoch_positions, move_iterator
from ..optimizer_state import Restorer
from ..optimizers import MultiNodeOptimizer, is_same_on_all
from ..trainer_introspection import iterators_of, updater_of
from .checked_file import RESERVED_PREFIX, State
from .state_dict import StateError, load_state_dict, state_dict

RANDOM = RESERVED_PREFIX + "random"
# Text of what `epoch_positions` returns.
_POSITIONS = RESERVED_PREFIX + "positions"
# Of a multi-node optimizer: counts of updates since its last step.
_ADDED_UP = "chainermn/accumulation/counts"


def saved_state(target: Any) -> State:
    """Return the state of ``target`` and where its iterators are; see :func:`state_dict`."""
    state = state_dict(target)
    state[_POSITIONS] = np.array(json.dumps(epoch_positions(target)))
    return state


def load(
    target: Any, states: Sequence[State], own: int, comm: CommunicatorBase
) -> tuple[str, list[Restorer]]:
    """Load the state that a rank had whose number was ``own``.

    ``states`` are of all ranks that there were, as far as others need them. StateError,
    with a part of it loaded, if it doesn't fit. The function returns what to say of
    another number of ranks, and what sets optimizers' numbers again.
    """
    has_same_size = len(states) == comm.size
    state = dict(states[own])
    positions = json.loads(str(state[_POSITIONS]))
    prefix = "" if target is updater_of(target) else "updater/"
    anew: list[str] = []
    for name, iterator in iterators_of(target).items():
        path = f"{prefix}iterator:{name}/"
        if has_same_size:
            if name in positions:
                count, _ = positions[name]
                _require_examples(name, iterator, count)
            # Its order of a shared permutation isn't this rank's.
            is_dealt = distributed_sampler(iterator) is not None
            is_adapted = own != comm.rank and is_dealt
        else:
            is_adapted = path + "current_position" in state
        if is_adapted:
            anew += move_iterator(iterator, name, path, states, state, positions)
    change = ""
    if not has_same_size:
        if state.pop(RANDOM, None) is not None:
            anew.insert(0, "random numbers")
        anew += _drop_added_gradients(state)
        change = f"saved by {len(states)} ranks, goes on with {comm.size}; begun anew: "
        change += ", ".join(anew) or "nothing"
    return change, load_state_dict(target, state)


def restore(restorers: Sequence[Restorer]) -> str:
    """Set optimizers' numbers as they were saved; return in words which the script had not.

    Extensions may set them when they are initialised, so it is called after that.
    """
    replaced = [words for restorer in restorers for words in restorer()]
    if not replaced:
        return ""
    return (
        f"as saved: {', '.join(replaced)}; to go on with another value, set it in an "
        "extension"
    )


def _drop_added_gradients(state: State) -> list[str]:
    """Let optimizers begin a step anew; return in words that some do."""
    dropped = []
    for name, counts in state.items():
        if name.endswith(_ADDED_UP) and counts[0] > 0:
            state[name] = np.zeros_like(counts)
            dropped = ["gradients that were added up"]
    return dropped


def _require_examples(name: str, iterator: Any, there: int) -> None:
    here = len(iterator.dataset)
    if here != there:
        raise StateError(
            f"iterator {name!r} has {here} examples here and had {there} there: its place in "
            "them belongs to a rank, and the data are divided differently now. Go on with "
            "the same data, or save the model and the optimizer alone"
        )


def mark_synchronized_if_equal(
    comm: CommunicatorBase, target: Any, optimizer: Any = None
) -> None:
    """Spare optimizers their broadcast, if ranks have the same (collective)."""
    candidates = [target, optimizer]
    updater = updater_of(target)
    if updater is not None:
        candidates += updater.get_all_optimizers().values()
    found = [each for each in candidates if isinstance(each, MultiNodeOptimizer)]
    for each in dict.fromkeys(found):
        if each.target and is_same_on_all(comm, each):
            each.assume_synchronized()

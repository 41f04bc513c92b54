"""How a rank's state is saved, and how any number of ranks load it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked, raise_together
from ..iterators import distributed_sampler, epoch_positions, move_iterator
from ..optimizer_state import Restorer
from ..optimizers import MultiNodeOptimizer, common_ranks
from ..random_states import load_random_state
from ..slots import Facts, compared_slots, facts_of
from ..trainer_introspection import iterators_of, updater_of
from .checked_file import RESERVED_PREFIX, State
from .checkpoint_folder import OPERATION, say
from .state_dict import StateError, load_state_dict, optimizers_of, state_dict

RANDOM = RESERVED_PREFIX + "random"
# The result of `epoch_positions`, as JSON.
_POSITIONS = RESERVED_PREFIX + "positions"
# A multi-node optimizer saves under this name how many gradients it has added up.
_ADDED_UP = "chainermn/accumulation/counts"


@contextmanager
def whole_states(comm: CommunicatorBase, target: Any) -> Iterator[None]:
    """Let the optimizers of ``target`` have their whole states in the block (collective).

    Ranks may have parts of these states. Ranks agree on the block's end by ``comm``.

    Raises:
        ValueError: on all ranks, if ranks outside of ``comm`` have some of the parts.
    """
    optimizers = [it for it in _multi_node_optimizers(target) if it.sharded]
    # All ranks of such an optimizer that are here raise alike.
    with raise_together(comm.handshake, OPERATION, meet=False):
        for optimizer in optimizers:
            group = optimizer.communicator
            if len(common_ranks(comm, group)) < group.size:
                raise ValueError(
                    "ranks that take no part in this save have parts of the optimizer's state "
                    "(sharded=True): save on all ranks of the optimizer's communicator"
                )
    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(optimizer.whole_states())
        stack.enter_context(raise_together(comm.handshake, OPERATION))
        yield


def _multi_node_optimizers(target: Any) -> list[MultiNodeOptimizer]:
    """Return those of a trainer, an updater or another object that has optimizers; each once."""
    candidates = [
        target,
        *optimizers_of(target).values(),
        *getattr(target, "__dict__", {}).values(),
    ]
    found = [each for each in candidates if isinstance(each, MultiNodeOptimizer)]
    return [each for each in dict.fromkeys(found) if each.target]


def saved_state(target: Any) -> State:
    """Return the state of ``target``, as :func:`state_dict` does, and its iterators' positions."""
    state = state_dict(target)
    state[_POSITIONS] = np.array(json.dumps(epoch_positions(target)))
    return state


def load(
    comm: CommunicatorBase,
    run: str,
    target: Any,
    states: Sequence[State],
    own: int,
    shared: State,
    optimizer: Any = None,
) -> list[Restorer]:
    """Load the state of the rank that had the number ``own`` (collective).

    ``states`` has the state of each rank that saved, without arrays that no other rank
    needs, and ``shared`` has the arrays that were the same on all of them.
    If the number of ranks has changed, rank 0 prints which state begins anew.
    Optimizers of the target, and ``optimizer``, needn't broadcast if their ranks have
    the same state now. When training begins, the caller passes the returned functions to
    :func:`restore`.

    Raises:
        StateError: the state doesn't fit the target, which may be partly loaded; or the
            number of ranks has changed, and their models were not the same.
    """
    state = dict(states[own])
    has_same_size = len(states) == comm.size
    sizes = f"saved by {len(states)} ranks, goes on with {comm.size}"
    with raise_together(comm.handshake, OPERATION):
        if not has_same_size:
            _require_one_model(target, state.keys() - shared, sizes)
        anew = _move_iterators(comm, target, states, own, state)
        if not has_same_size:
            anew = ["random numbers", *anew, *_drop_added_gradients(state)]
            say(comm, run, f"{sizes}; begun anew: {', '.join(anew)}")
        restorers = load_state_dict(target, state)
    if has_same_size and RANDOM in state:
        restorers.append(partial(load_random_state, target, str(state[RANDOM])))
    # `optimizer` comes last, because some ranks may have been called without it.
    found = _multi_node_optimizers(target)
    if isinstance(optimizer, MultiNodeOptimizer) and optimizer not in found:
        found.append(optimizer)
    _assume_synchronized(comm, found)
    return restorers


def parameters_of(target: Any) -> list[Any]:
    """Return names and parameters of a target's models.

    Models are found by the optimizers of a trainer or an updater. Another target is a
    model, or has models for its attributes.
    """
    optimizers = optimizers_of(target).values()
    models = [each.target for each in optimizers] or [target, *vars(target).values()]
    return [
        named for model in models for named in getattr(model, "namedparams", tuple)()
    ]


def _require_one_model(target: Any, differing: Iterable[str], sizes: str) -> None:
    """Raise StateError if a parameter was not the same on all ranks that saved it."""
    paths = [path for path, _ in parameters_of(target)]
    for name in sorted(differing):
        # Multi-node optimizers save gradients by such paths, too.
        if "chainermn/" not in name and f"/{name}".endswith(tuple(paths)):
            raise StateError(
                f"{sizes}, and {name!r} was not the same on all ranks that saved it: each "
                "file has the parameters of its own rank, as of a model that ranks hold in "
                "parts. Go on with as many ranks as saved it. If all ranks are to have one "
                "model, call comm.bcast_data(model) there, and save it again"
            )


def _assume_synchronized(
    comm: CommunicatorBase, optimizers: list[MultiNodeOptimizer]
) -> None:
    """Spare optimizers a broadcast that would change nothing (collective).

    An optimizer is spared if all ranks of its own communicator belong to ``comm`` and
    have the same bits in the optimizer at this place of their lists. The lists of other
    ranks may be shorter. An optimizer's communicator is not used, because some of its
    ranks may load nothing.
    """

    def own() -> list[Facts]:
        return [
            facts_of(compared_slots(each), with_checksums=True) for each in optimizers
        ]

    columns = zip_longest(*allgather_checked(comm, OPERATION, own))
    for each, facts in zip(optimizers, columns, strict=False):
        group = each.communicator
        everyones = [facts[rank] for rank in common_ranks(comm, group)]
        if everyones == [facts[comm.rank]] * group.size:
            each.assume_synchronized()


def _move_iterators(
    comm: CommunicatorBase,
    target: Any,
    states: Sequence[State],
    own: int,
    state: State,
) -> list[str]:
    """Adapt the iterators' entries of ``state`` to this rank; return in words what begins anew."""
    positions = json.loads(str(state[_POSITIONS]))
    prefix = "" if target is updater_of(target) else "updater/"
    anew = []
    for name, iterator in iterators_of(target).items():
        path = f"{prefix}iterator:{name}/"
        if len(states) != comm.size:
            is_moved = path + "current_position" in state
        else:
            if name in positions:
                here = len(iterator.dataset)
                there = positions[name][0]
                if here != there:
                    raise StateError(
                        f"iterator {name!r} has {here} examples here and had {there} there: its "
                        "place in them belongs to a rank, and the data are divided differently "
                        "now. Go on with the same data, or save the model and the optimizer alone"
                    )
            # Ranks share a permutation, and another rank saved its own part of it.
            is_moved = own != comm.rank and distributed_sampler(iterator) is not None
        if is_moved:
            anew += move_iterator(iterator, name, path, states, state, positions)
    return anew


def restore(comm: CommunicatorBase, run: str, restorers: Sequence[Restorer]) -> None:
    """Set saved numbers again; print on rank 0 which numbers the script had set otherwise.

    Extensions may set optimizers' numbers when they are initialised, so the caller must
    wait until all extensions are initialised.
    """
    replaced = [words for restorer in restorers for words in restorer()]
    if replaced:
        say(
            comm,
            run,
            f"as saved: {', '.join(replaced)}; to go on with another value, set it in an "
            "extension",
        )


def _drop_added_gradients(state: State) -> list[str]:
    """Drop gradients that optimizers have added up; return in words what was dropped."""
    dropped = []
    for name, counts in state.items():
        if name.endswith(_ADDED_UP) and counts[0] > 0:
            state[name] = np.zeros_like(counts)
            dropped = ["gradients that were added up"]
    return dropped

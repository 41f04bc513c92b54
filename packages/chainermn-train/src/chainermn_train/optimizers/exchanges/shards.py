"""Parts of parameters, which one rank steps, and the model that these parts are to an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import chainer
import numpy as np

from ...slots import MASTER, is_array, master_of, set_master

# Parts begin at cache lines, if parameters have 4 bytes.
_ALIGNMENT = 16

# What an update rule has by its keys, and the float32 value beside a float16 parameter.
State: TypeAlias = dict[str, Any]


@dataclass(eq=False)
class Shard:
    """This rank's part of a parameter, with the part's state.

    Between two steps the update rule of the parameter has no state.

    Attributes:
        param: the model's parameter.
        array: its array, in the file of the machine.
        part: where the rank's part lies in the flat parameter.
        values: the part's values, where all ranks of the machine have them.
        piece: the part as a parameter, which optimizers can step.
        state: the part's state.
    """

    param: Any
    array: Any
    part: slice
    values: np.ndarray
    state: State

    def __post_init__(self) -> None:
        self.piece = chainer.Parameter(self.values, name=self.param.name)
        self.piece.update_rule = self.param.update_rule
        # How ranks hold a model in parts; see `chainermn_comm.Sharding`.
        self.piece.shardings = getattr(self.param, "shardings", ())

    def lend_state(self) -> None:
        """Let the update rule have the part's state, and be the piece's."""
        rule = self.param.update_rule
        if self.piece.update_rule is not rule:  # the user has given another one
            self.piece.update_rule = rule
            self.state = {}
        # Else another shard of the same rule has the state of both.
        if self.state:
            set_state(self.param, self.state)

    def take_state(self) -> None:
        """Take the state that the update rule has now, and the values if they lie elsewhere."""
        if self.piece.array is not self.values:  # the rule has float32 values, too
            self.values[...] = self.piece.array
            self.piece.array = self.values
        self.state = state_of(self.param)
        set_state(self.param, {})


def part_of(size: int, rank: int, ranks: int) -> slice:
    """Return which elements of so many are one rank's."""
    start, stop = [
        size * bound // ranks // _ALIGNMENT * _ALIGNMENT for bound in (rank, rank + 1)
    ]
    if rank == ranks - 1:
        stop = size
    return slice(start, stop)


def state_of(param: Any) -> State:
    """Return the state of a parameter's update rule, which may be None."""
    state = dict(getattr(param.update_rule, "state", None) or {})
    master = master_of(param)
    if master is not None:
        state[MASTER] = master
    return state


def set_state(param: Any, state: State) -> None:
    """Give an update rule, if there is one, this state."""
    if param.update_rule is not None:
        own = dict(state)
        set_master(param, own.pop(MASTER, None))
        param.update_rule._state = own or None  # None lets the rule begin


def cut(state: State, part: slice) -> State:
    """Return a part of the state of a whole parameter."""
    parts = dict(state)
    for key, value in state.items():
        if is_array(value):
            parts[key] = value.reshape(-1)[part].copy()
    return parts


def merge(states: Sequence[State], shape: tuple[int, ...]) -> State:
    """Return the state of a whole parameter of that shape, of its parts in order."""
    whole = dict(states[0])
    for key, value in whole.items():
        if is_array(value):
            parts = [state[key] for state in states]
            whole[key] = np.concatenate(parts).reshape(shape)
    return whole


class ShardModel:
    """What an optimizer steps in the place of its model: this rank's parts of the parameters."""

    def __init__(self, target: Any, shards: Iterable[Shard]) -> None:
        pieces = {id(shard.param): shard.piece for shard in shards}
        # As often as the model has them. One without values is its own piece.
        self._named = [
            (name, pieces.get(id(param), param)) for name, param in target.namedparams()
        ]

    def namedparams(self, include_uninit: bool = True) -> list[tuple[str, Any]]:
        return [
            each for each in self._named if include_uninit or each[1].is_initialized
        ]

    def params(self, include_uninit: bool = True) -> list[Any]:
        return [param for _, param in self.namedparams(include_uninit)]


@contextmanager
def stepping_shards(
    optimizer: Any, shards: Sequence[Shard], hooks: dict[str, Any]
) -> Iterator[None]:
    """Let an optimizer step shards in the block, with these hooks before a step."""
    target = optimizer.target
    own_hooks = optimizer._hookable._pre_update_hooks
    optimizer.target = ShardModel(target, shards)
    optimizer._hookable._pre_update_hooks = hooks
    for shard in shards:
        shard.lend_state()
    try:
        yield
    finally:
        for shard in shards:
            shard.take_state()
        optimizer._hookable._pre_update_hooks = own_hooks
        optimizer.target = target

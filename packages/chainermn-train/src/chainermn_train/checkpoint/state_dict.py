"""The state of a Chainer object, as arrays without pickles."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import numpy as np
from chainer.serializers import DictionarySerializer, NpzDeserializer

from ..optimizer_state import Restorer, serialize_settings
from ..optimizers import MultiNodeOptimizer
from ..slots import is_array
from ..trainer_introspection import updater_of
from .checked_file import RESERVED_PREFIX, State

# A regular expression for the names of entries that needn't be read: the state of
# iterators, extensions and triggers that the trainer no longer has, and entries that
# other functions read.
_MAY_BE_LEFT = re.compile("(updater/)?iterator:|extension|stop_trigger|.*chainermn")
# The names of values that are None, which NumPy stores only by pickling.
_NONE = RESERVED_PREFIX + "none"


class StateError(ValueError):
    """A stored state doesn't fit the object that it is loaded into."""


def require_serializable(target: Any) -> None:
    """Raise TypeError unless Chainer can serialize ``target``."""
    if not callable(getattr(target, "serialize", None)):
        raise TypeError(
            f"a checkpoint holds what Chainer can serialize, not {type(target).__name__}: "
            "give a trainer, updater, optimizer, link or iterator"
        )


def state_dict(target: Any) -> State:
    """Return the state of ``target`` as arrays in C order in host memory.

    An array may share its memory with the target, and change when the target changes.

    Raises:
        TypeError: ``target`` has no ``serialize``, or a value that only pickle could
            store.
    """
    require_serializable(target)
    serializer = DictionarySerializer()
    serializer.save(target)
    _serialize_settings(target, serializer)
    state = {}
    without_value: list[str] = []
    for name, value in serializer.target.items():
        array = np.asarray(value, order="C")
        if array.dtype.hasobject:
            if array.ndim > 0 or array[()] is not None:
                raise TypeError(
                    f"{name!r} can't be stored in a checkpoint: only pickle could store "
                    f"{array!r:.80}, and a checkpoint is never unpickled; let its "
                    "`serialize` store numbers, strings, None or arrays of them"
                )
            without_value.append(name)
        else:
            state[name] = array
    state[_NONE] = np.array(json.dumps(without_value))
    return state


def load_state_dict(target: Any, state: State) -> list[Restorer]:
    """Load a state into ``target``; return functions that set its optimizers' numbers again.

    Every entry of a model or an optimizer must be read. A trainer may have fewer
    iterators and extensions than were saved.

    Raises:
        StateError: the state doesn't fit the target, which may be partly loaded.
    """
    stored = dict(state)
    for name in json.loads(str(stored.get(_NONE, "[]"))):
        stored[name] = np.array(None)
    deserializer = _CheckedDeserializer(stored)
    deserializer.read = set()
    deserializer.restorers = []
    try:
        _serialize_settings(target, deserializer)
        deserializer.load(target)
    except KeyError as error:
        raise StateError(
            f"the stored state lacks {error}: it was taken of an "
            "object that was made differently (other layers, optimizer or extensions?)"
        ) from error
    unread = [
        it for it in stored.keys() - deserializer.read if not _MAY_BE_LEFT.match(it)
    ]
    if unread:
        raise StateError(
            f"the stored state has {sorted(unread)}, and there is no such thing here: it was "
            "taken of another model or optimizer. Make them as they were, or take the model "
            "alone out of each rank's file, by chainer.serializers.load_npz(file, model, "
            "path='updater/model:main/', strict=False)"
        )
    return deserializer.restorers


def optimizers_of(target: Any) -> dict[str, Any]:
    """Return the optimizers of a trainer or updater by their paths in a state."""
    updater = updater_of(target)
    if updater is None:
        return {}
    prefix = "" if updater is target else "updater/"
    return {
        f"{prefix}optimizer:{name}": optimizer
        for name, optimizer in updater.get_all_optimizers().items()
    }


def _serialize_settings(target: Any, serializer: Any) -> None:
    """Save or load the numbers of optimizers, except optimizers that do so themselves."""
    for path, optimizer in optimizers_of(target).items():
        if not isinstance(optimizer, MultiNodeOptimizer):
            serialize_settings(optimizer, serializer[path]["chainermn"])


class _CheckedDeserializer(NpzDeserializer):
    """A deserializer that refuses arrays which NumPy would broadcast or round to fit."""

    # All children share the set of names that were asked for, and the list to which
    # optimizers add restorers.
    read: set[str]
    restorers: list[Restorer]

    def __getitem__(self, key: str) -> _CheckedDeserializer:
        child = copy.copy(self)
        child.path = f"{self.path}{key.strip('/')}/"
        return child

    def __call__(self, key: str, value: Any) -> Any:
        name = self.path + key.lstrip("/")
        self.read.add(name)
        stored = self.npz.get(name)
        if stored is None:
            # Chainer's own optimizers ask for the state of an update rule that had none,
            # because its parameter had no values. Multi-node optimizers don't ask.
            param = self.npz.get(self.path.replace("optimizer:", "model:").rstrip("/"))
            if value is None and param is not None and param.dtype == object:
                return None
            return super().__call__(key, value)  # which raises KeyError
        shape = getattr(value, "shape", stored.shape)
        if stored.dtype != object and stored.shape != shape:
            raise StateError(
                f"{name!r} has shape {stored.shape} in the stored state and {shape} here: it "
                "was taken of an object that was made differently, or it belongs to a rank, "
                "and their number has changed"
            )
        is_float = is_array(value) and value.dtype.kind == stored.dtype.kind == "f"
        if is_float and stored.dtype != value.dtype:
            raise StateError(
                f"{name!r} has dtype {stored.dtype} in the stored state and {value.dtype} "
                "here: make the model with the same chainer.config.dtype"
            )
        return super().__call__(key, value)

"""The states of random generators, as text."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

from .trainer_introspection import iterators_of


def random_state(target: Any) -> str:
    """Return the states of NumPy's and Python's global generators, and of order samplers."""
    generators = _generators_of(target).items()  # CuPy's states can't be read
    state = {
        "python": random.getstate(),
        "numpy": {name: each.get_state(legacy=False) for name, each in generators},
    }
    return json.dumps(state, default=lambda array: array.tolist())


def load_random_state(target: Any, text: str) -> list[str]:
    """Set the generators to the state that :func:`random_state` returned; return no words.

    So the function is a :data:`~chainermn_train.optimizer_state.Restorer`.
    """
    state = json.loads(text)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    for name, generator in _generators_of(target).items():
        if name in state["numpy"]:
            generator.set_state(state["numpy"][name])
    return []


def _generators_of(target: Any) -> dict[str, np.random.RandomState]:
    """Return NumPy's global generator and the generators of a trainer's iterators."""
    generators = {"global": np.random.random.__self__}  # type: ignore[attr-defined]
    # Chainer has no public names for them; 7.8.1 is its last release.
    for name, iterator in iterators_of(target).items():
        generator = getattr(getattr(iterator, "order_sampler", None), "_random", None)
        if isinstance(generator, np.random.RandomState):
            generators[f"iterator {name}"] = generator
    return generators

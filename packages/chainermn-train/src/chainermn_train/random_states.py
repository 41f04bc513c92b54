"""The states of random generators, as text."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

from .trainer_introspection import iterators_of


def random_state(target: Any) -> str:
    """Return the state of NumPy's global generator, Python's, and those of order samplers."""
    samplers = _sampler_generators(target).items()  # CuPy's generators can't be read
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "iterators": {name: each.get_state(legacy=False) for name, each in samplers},
    }
    return json.dumps(state, default=lambda array: array.tolist())


def load_random_state(target: Any, text: str) -> None:
    """Set the generators to the state that :func:`random_state` returned."""
    state = json.loads(text)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    for name, generator in _sampler_generators(target).items():
        if name in state["iterators"]:
            generator.set_state(state["iterators"][name])


def _sampler_generators(target: Any) -> dict[str, np.random.RandomState]:
    """Return the generators that a trainer's or updater's iterators don't share with NumPy."""
    found = {}
    # Chainer has no public names for them; 7.8.1 is its last release.
    for name, iterator in iterators_of(target).items():
        generator = getattr(getattr(iterator, "order_sampler", None), "_random", None)
        shared = generator is np.random.random.__self__  # type: ignore[attr-defined]
        if isinstance(generator, np.random.RandomState) and not shared:
            found[name] = generator
    return found

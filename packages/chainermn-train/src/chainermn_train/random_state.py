"""The random generators that a training run draws from, as text.

NumPy's global one, Python's, and those of iterators' order samplers. CuPy's can't be read.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

from .targets import iterators_of


def capture_random(target: Any) -> str:
    """The state of the generators.

    Args:
        target: a trainer or updater, whose iterators may have generators of their own.
    """
    numpy_states = {name: each.get_state(legacy=False) for name, each in _own(target).items()}
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "iterators": numpy_states,
    }
    return json.dumps(state, default=lambda array: array.tolist())


def restore_random(target: Any, text: str) -> None:
    """Give the generators the state that :func:`capture_random` returned."""
    state = json.loads(text)
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    for name, generator in _own(target).items():
        if name in state["iterators"]:
            generator.set_state(state["iterators"][name])


def _own(target: Any) -> dict[str, np.random.RandomState]:
    """The generators that a trainer's or updater's iterators don't share with NumPy.

    Chainer has no public names for them; 7.8.1 is its last release.
    """
    found = {}
    for name, iterator in iterators_of(target).items():
        generator = getattr(getattr(iterator, "order_sampler", None), "_random", None)
        shared = generator is np.random.random.__self__  # type: ignore[attr-defined]
        if isinstance(generator, np.random.RandomState) and not shared:
            found[name] = generator
    return found

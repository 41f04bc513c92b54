"""Functions that find the parts of a trainer or an updater."""

from __future__ import annotations

import warnings
from typing import Any

from chainer.iterators import MultiprocessIterator, ShuffleOrderSampler
from chainer.training import Trainer, Updater


def updater_of(target: Any) -> Any:
    """Return the updater of a trainer, or ``target`` if it is an updater; otherwise None."""
    # An attribute proves nothing: links have children of any name.
    if isinstance(target, Trainer):
        return target.updater
    return target if isinstance(target, Updater) else None


def iterators_of(target: Any) -> dict[str, Any]:
    """Return the iterators of a trainer or updater by name; Chainer has no public list."""
    return dict(getattr(updater_of(target), "_iterators", {}))


def warn_of_lost_order(target: Any) -> None:
    """Warn if a resumed run would see other batches than an uninterrupted run."""
    for name, iterator in iterators_of(target).items():
        actual = getattr(iterator, "actual", iterator)  # of a synchronized iterator
        if isinstance(actual, MultiprocessIterator) and isinstance(
            actual.order_sampler, ShuffleOrderSampler
        ):
            warnings.warn(
                f"iterator {name!r} is a MultiprocessIterator that shuffles and draws orders ahead "
                "of time, which no checkpoint knows of, so a resumed run may see other batches: "
                "give it order_sampler=chainermn.iterators.ResumableOrderSampler()",
                RuntimeWarning,
                stacklevel=4,
            )

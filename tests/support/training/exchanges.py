"""What tests of every exchange of gradients share: its kinds, and one process that does as much."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from chainer import Link

from chainermn_train import PowerSGD, create_multi_node_optimizer
from tests.support.training.trainers import parameter_bits, state_of


@dataclass(frozen=True)
class Kind:
    """An exchange: how it is asked for, and what it promises."""

    # Of `create_multi_node_optimizer`.
    arguments: dict[str, Any] = field(default_factory=dict)
    delay: int = 0  # steps from that which takes gradients to that which uses them
    agreements: int = 1  # of an update, the first of which comes before data move
    tolerance: float = 1e-10  # of parameters in double precision


KINDS = {
    "synchronous": Kind({"overlap": False}),
    "double buffering": Kind({"double_buffering": True}, delay=1),
    # Before backward and after it.
    "overlap": Kind({"overlap": True}, agreements=2),
    "sharded": Kind({"sharded": True}),
    # Of so many columns that products lack nothing but the digits beyond float32.
    "PowerSGD": Kind(
        {"compression": PowerSGD(32, start_step=0, min_ratio=0)}, tolerance=1e-5
    ),
}
# Those whose ranks step whole parameters, with any hooks and rules.
WHOLE_KINDS = [name for name in KINDS if name != "sharded"]

# For tests whose `comm` needs be no third party's, too: it shares memory, where
# gradients lie that a reducer was given and that nobody steps along.
HIERARCHICAL = pytest.mark.parametrize("comm", ["hierarchical"], indirect=True)


def exchanging(
    kind: str,
    comm,
    actual,
    model: Link,
    steps: int = 1,
    **settings,
):
    """A multi-node optimizer of that kind."""
    settings |= KINDS[kind].arguments
    settings["accumulate_steps"] = steps
    return create_multi_node_optimizer(actual, comm, **settings).setup(model)


def states(optimizer) -> dict[str, bytes | None]:
    """The bits of the parameters, and of what Chainer's optimizer saves: counts and moments."""
    found = state_of(optimizer.actual_optimizer)
    kept = {
        key: None if it is None else np.asarray(it).tobytes()
        for key, it in found.items()
    }
    return {
        **parameter_bits(optimizer.target),
        **{f"state of {key}": kept[key] for key in kept},
    }


class OneProcess:
    """Trains with the batches of all ranks put together, and knows nothing of ranks."""

    def __init__(self, kind: str, optimizer, steps: int = 1):
        """The optimizer was set up; so many updates make a step, as in `accumulate_steps`."""
        self._optimizer = optimizer
        self.target = optimizer.target
        self._delay = KINDS[kind].delay
        self._steps = steps
        self._group: list[dict[str, Any]] = []  # gradients by name, of each update
        self._waiting: list[dict[str, Any]] = []  # their means, which no step has used

    def update(self, *batch):
        """Without a batch along the gradients that there are."""
        if batch:
            loss = self.target(*batch)
            self.target.cleargrads()
            loss.backward(loss_scale=self._optimizer._loss_scale)
        self._group.append(
            {name: param.grad for name, param in self.target.namedparams()}
        )
        if len(self._group) == self._steps:
            self._end_group()
            if len(self._waiting) > self._delay:
                self._step()

    def flush(self):
        if self._group:
            self._end_group()
        while self._waiting:
            self._step()

    def _end_group(self):
        means = {}
        for name in self._group[0]:
            terms = [grads[name] for grads in self._group if grads[name] is not None]
            if terms:
                means[name] = sum(terms) / len(self._group)
            else:
                means[name] = None
        self._waiting.append(means)
        self._group = []

    def _step(self):
        means = self._waiting.pop(0)
        for name, param in self.target.namedparams():
            if means[name] is None:
                param.grad = None
            else:
                param.grad = means[name].copy()
        self._optimizer.update()

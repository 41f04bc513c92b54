"""Random graphs of components on several ranks, and what they give in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import chainer.functions as F
import numpy as np
import pytest
from chainer import Chain, Parameter, Variable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from tests.support.plugins.pairwise import tiered

UNITS = 3


@dataclass(frozen=True)
class Part:
    """A component: on which rank it is, where data come from and go, how many it gives."""

    rank: int
    rank_in: Any = None
    rank_out: Any = None
    gives: int = 1
    uses_input: bool = True


class Component(Chain):
    """tanh of a weighted sum of all inputs, once for each output."""

    def __init__(self, seed: int, gives: int, uses_input: bool):
        super().__init__()
        self.uses_input = uses_input
        random = default_rng(seed)
        with self.init_scope():
            self.w = Parameter(random.normal(size=(gives, UNITS, UNITS)))

    def forward(self, *arguments):
        total = 0
        for weight, argument in enumerate(flat(arguments), start=1):
            total = total + weight * argument
        if not self.uses_input:
            if isinstance(total, Variable):
                total = total.array * 0 + 1
            else:
                total = total * 0 + 1
        outputs = tuple(
            F.tanh(F.matmul(F.broadcast_to(total, (2, UNITS)), w)) for w in self.w
        )
        if len(outputs) > 1:
            return outputs
        return outputs[0]


def flat(x) -> list[Any]:
    if isinstance(x, tuple):
        return [each for item in x for each in flat(item)]
    return [x]


def listed(ranks) -> list[int]:
    if ranks is None:
        return []
    if isinstance(ranks, int):
        return [ranks]
    return list(ranks)


def components(graph: list[Part]) -> list[Component]:
    return [Component(i, part.gives, part.uses_input) for i, part in enumerate(graph)]


def model_input() -> np.ndarray:
    return default_rng(99).normal(size=(2, UNITS))


def loss_of(outputs):
    return sum(F.sum(output * output) for output in flat(outputs))


def in_one_process(graph: list[Part], links: list[Component]) -> dict[int, Any]:
    """Each rank's output."""
    waiting: dict[tuple[int, int], deque] = {}
    outputs: dict[int, Any] = {}
    for part, link in zip(graph, links, strict=True):
        arguments = (model_input(),)
        if part.rank_in is not None:
            arguments = tuple(
                waiting[r, part.rank].popleft() for r in listed(part.rank_in)
            )
        returned = link(*arguments)
        for dest in listed(part.rank_out):
            waiting.setdefault((part.rank, dest), deque()).append(returned)
        if part.rank_out is None:
            outputs[part.rank] = returned
    assert not any(waiting.values())
    return outputs


@st.composite
def graphs(draw, size: int) -> list[Part]:
    """Components in an order in which they can run; messages are received as they were sent."""
    graph: list[Part] = []
    # At each rank: how many from whom.
    waiting = [{} for _ in range(size)]
    for _ in range(draw(st.integers(1, 7))):
        rank = draw(st.integers(0, size - 1))
        senders = [r for r, count in waiting[rank].items() for _ in range(count)]
        count = draw(st.integers(min(1, len(senders)), len(senders)))
        taken = draw(st.permutations(senders))[:count]
        for sender in taken:
            waiting[rank][sender] -= 1
        ranks = st.integers(0, size - 1)
        others = draw(st.lists(ranks, min_size=1, max_size=2))
        for dest in others:
            waiting[dest][rank] = waiting[dest].get(rank, 0) + 1
        uses = draw(st.booleans())
        weights = draw(st.integers(1, 2))
        graph.append(Part(rank, taken or None, others, weights, uses))
    for rank in range(size):  # what is left over makes the rank's output
        senders = [r for r, count in waiting[rank].items() for _ in range(count)]
        if senders:
            graph.append(Part(rank, senders, None))
    return graph


def any_of(examples: int):
    """Parametrize a test by the communicator and how many graphs it checks."""
    names = ["naive", "third party"]
    cases = tiered([(name, examples) for name in names], names, [100])
    return pytest.mark.parametrize(("comm", "examples"), cases, indirect=["comm"])


def check_drawn(check: Callable[[list[Part]], None], size: int, examples: int):
    """Check so many graphs, the same ones on all ranks."""
    how = settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    how(given(graphs(size))(check))()

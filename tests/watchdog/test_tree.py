"""The tree of machines."""

from __future__ import annotations

import pytest

from chainermn_comm.watchdog.tree import FANOUT, most_steps, neighbours


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 22, 100, 1024])
def test_machines_are_few_steps_from_one_another_and_have_few_neighbours(size):
    links = {(one, other) for one in range(size) for other in neighbours(one, size)}
    assert links == {(other, one) for one, other in links}
    assert len(links) == 2 * (size - 1)
    assert max(len(neighbours(one, size)) for one in range(size)) <= FANOUT + 1
    steps = {size - 1: 0}
    todo = [size - 1]
    for one in todo:  # which grows meanwhile
        for other in neighbours(one, size):
            if other not in steps:
                steps[other] = steps[one] + 1
                todo.append(other)
    assert len(steps) == size  # all are reached
    assert max(steps.values()) <= most_steps(size)
    assert most_steps(1024) == 10

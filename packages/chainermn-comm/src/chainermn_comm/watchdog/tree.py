"""The tree of a job's machines, by number: which one queries which, and which is behind which."""

from __future__ import annotations

# The most children: a machine has few connections, and the last of 1,024 is five steps from
# the first.
FANOUT = 4


def neighbours(number: int, size: int) -> list[int]:
    """Return the parent of a machine, if it has one, and its children; of ``size`` machines."""
    first = number * FANOUT + 1
    children = range(min(first, size), min(first + FANOUT, size))
    return [*([(number - 1) // FANOUT] if number else []), *children]


def most_steps(size: int) -> int:
    """Return how many steps it is from one machine to another at most."""
    steps, number = 0, size - 1
    while number > 0:
        number = (number - 1) // FANOUT
        steps += 2
    return min(steps, size - 1)

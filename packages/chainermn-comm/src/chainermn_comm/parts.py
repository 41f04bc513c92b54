"""Whether ranks hold the same part of a parameter, and so may share it; starts no MPI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# The name of entries that differ if ranks hold different parts, with the remedy.
PART = (
    "the part that they hold of a parameter (means and broadcasts need a communicator of "
    "the ranks that hold the same part: comm.split)"
)


def part_entries(named: Iterable[Any]) -> tuple[Any, ...]:
    """Return entries of a handshake's signature that are equal on ranks with the same parts.

    ``named`` has names and parameters. A parameter that all ranks hold whole has no entry.
    """
    return tuple(
        (PART, name, f"{each.kind} {each.group.rank} of {each.group.size}")
        for name, param in named
        for each in getattr(param, "shardings", ())
        if each.kind != "replica" and each.group.size > 1
    )

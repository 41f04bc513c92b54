"""Sentences about several hosts, and commands to be run there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

MOST_NAMED = 5


def listed(names: Sequence[str]) -> str:
    """Names with commas, the last with "and"; shortened where there are many."""
    shown = list(names[:MOST_NAMED])
    if len(names) > MOST_NAMED:
        shown.append(f"{len(names) - MOST_NAMED} more")
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def told(problems: Mapping[str, str]) -> str:
    """What is wrong with which hosts, those with the same problem together."""
    hosts: dict[str, list[str]] = {}
    for host, problem in problems.items():
        hosts.setdefault(problem, []).append(host)
    parts = [f"{listed(names)}: {problem}" for problem, names in hosts.items()]
    shown = parts[:MOST_NAMED]
    if len(parts) > MOST_NAMED:
        shown.append(f"and so on, {len(problems)} hosts in all")
    return "; ".join(shown)


def all_of(names: Sequence[str]) -> str:
    """The subject of a sentence about hosts of which all is well."""
    if len(names) == 1:
        return names[0]
    return "both hosts" if len(names) == 2 else f"all {len(names)} hosts"


def on(host: str, *words: str) -> str:
    """A command that runs another one on a host."""
    return shlex.join(["ssh", host, shlex.join(words)])

"""Hosts and how many ranks each gets, from a list or a hostfile of any MPI."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# What ssh could take for an option, and a shell for anything but a word, is no name of a host.
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
# `host`, `host:2` (MPICH) or `host slots=2` (Open MPI), then Open MPI's limit, which we needn't.
LINE = re.compile(r"(?P<name>[^\s:]+)(?::(?P<after>\d+))?(?:\s+slots\s*=\s*(?P<slots>\d+))?")
LIMIT = re.compile(r"\s+max[_-]slots\s*=\s*\d+$")


@dataclass(frozen=True)
class Host:
    """A host that was named, and how many ranks it may get; None where that wasn't said."""

    name: str
    slots: int | None


def from_list(text: str) -> tuple[Host, ...]:
    """Hosts as in ``a,b`` or ``a:2,b:4``.

    Raises:
        ValueError: something in it is no host.
    """
    return _merged(_host(part, f"--hosts {text!r}") for part in text.split(","))


def from_file(text: str, name: str) -> tuple[Host, ...]:
    """Hosts of a hostfile's text: a host a line, as MPICH or Open MPI write it, and ``#`` comments.

    Args:
        text: of the file.
        name: of the file, for errors.

    Raises:
        ValueError: a line is no host, or there is none.
    """
    lines = [line.split("#", 1)[0].strip() for line in text.splitlines()]
    hosts = _merged(
        _host(LIMIT.sub("", line), f"line {number} of {name}")
        for number, line in enumerate(lines, start=1)
        if line
    )
    if not hosts:
        raise ValueError(f"{name} names no host")
    return hosts


def deal(hosts: Sequence[Host], ranks: int | None) -> dict[str, int]:
    """How many ranks each host gets.

    Args:
        hosts: in the order in which they are filled.
        ranks: how many there are; None for as many as the hosts may get.

    Returns:
        The hosts that get any; without numbers of slots they share the ranks evenly.

    Raises:
        ValueError: the ranks don't fit.
    """
    if ranks is None:
        return {host.name: 1 if host.slots is None else host.slots for host in hosts}
    if all(host.slots is None for host in hosts):
        each, more = divmod(ranks, len(hosts))
        shares = [each + (number < more) for number in range(len(hosts))]
    else:
        shares, left = [], ranks
        for host in hosts:
            shares.append(min(left, 1 if host.slots is None else host.slots))
            left -= shares[-1]
        if left:
            raise ValueError(
                f"{ranks} ranks don't fit: the hosts have {ranks - left} slots; name more hosts, "
                "or more slots as in host:4"
            )
    return {host.name: share for host, share in zip(hosts, shares, strict=True) if share}


def _host(text: str, where: str) -> Host:
    found = LINE.fullmatch(text.strip())
    if found is None or not NAME.fullmatch(found["name"]):
        raise ValueError(
            f"{text!r} in {where} is no host; write a name or an address, and its number of "
            "ranks after a colon, as in host:4"
        )
    if found["after"] and found["slots"]:
        raise ValueError(f"{text!r} in {where} says twice how many ranks")
    slots = found["after"] or found["slots"]
    if slots is not None and not 0 < int(slots[:9]) < 10**6:
        raise ValueError(f"{text!r} in {where} gives the host {slots} ranks")
    return Host(found["name"], None if slots is None else int(slots))


def _merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """A host that is named several times gets its ranks together, as both MPIs have it."""
    merged: dict[str, Host] = {}
    for host in hosts:
        if host.name in merged:
            before = merged[host.name].slots
            host = Host(host.name, (before or 1) + (host.slots or 1))
        merged[host.name] = host
    return tuple(merged.values())

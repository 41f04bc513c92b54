"""Host lists and hostfiles, in the syntax of any MPI, and how many ranks each host gets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# What ssh could take for an option, and a shell for anything but a word, is no name of
# a host.
HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
# `host`, `host:2` (MPICH), or `host slots=2` (Open MPI; `cpu=2` and `cpus=2` in its old
# releases).
LINE = re.compile(
    r"(?P<name>[^\s:]+)(?::(?P<hydra>\d+))?(?:\s+(?:slots|cpus?)\s*=\s*(?P<open_mpi>\d+))?"
)
# Open MPI's limit, which does not matter here: ranks are assigned to hosts explicitly.
MAX_SLOTS = re.compile(r"\s+max[_-]slots\s*=\s*\d+$")
MAX_RANKS = 10**6


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it may get."""

    name: str  # or an address
    slots: int | None  # None where no number was given


def parse_host_list(text: str) -> tuple[Host, ...]:
    """Parse a list of hosts, as in ``a,b`` or ``a:2,b:4``; raise ValueError for what is none."""
    return _merge(_parse_host(part, f"--hosts {text!r}") for part in text.split(","))


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Parse the text of a hostfile: a host a line, as MPICH or Open MPI write it, and comments.

    Raise ValueError if a line is no host, or there is none.
    """
    lines = [line.split("#", 1)[0].strip() for line in text.splitlines()]
    hosts = _merge(
        _parse_host(MAX_SLOTS.sub("", line), f"line {number} of {path}")
        for number, line in enumerate(lines, start=1)
        if line
    )
    if not hosts:
        raise ValueError(f"{path} names no host")
    return hosts


def assign_slots(hosts: Sequence[Host], ranks: int | None) -> dict[str, int]:
    """Return how many ranks each host gets, without the hosts that get none.

    Hosts are filled in their order; without numbers of slots they share the ranks
    evenly. None for the ranks stands for all slots. Raise ValueError if the ranks don't
    fit.
    """
    if ranks is None:
        return {host.name: host.slots or 1 for host in hosts}
    if all(host.slots is None for host in hosts):
        each, more = divmod(ranks, len(hosts))
        shares = [each + (number < more) for number in range(len(hosts))]
    else:
        shares, left = [], ranks
        for host in hosts:
            shares.append(min(left, host.slots or 1))
            left -= shares[-1]
        if left:
            raise ValueError(
                f"{ranks} ranks don't fit: the hosts have {ranks - left} slots; name more hosts, "
                "or more slots as in host:4"
            )
    return {
        host.name: share for host, share in zip(hosts, shares, strict=True) if share
    }


def _parse_host(text: str, where: str) -> Host:
    found = LINE.fullmatch(text.strip())
    if found is None or not HOST_NAME.fullmatch(found["name"]):
        raise ValueError(
            f"{text!r} in {where} is no host; write a name or an address, and its number of "
            "ranks after a colon, as in host:4"
        )
    if found["hydra"] and found["open_mpi"]:
        raise ValueError(f"{text!r} in {where} says twice how many ranks")
    slots = found["hydra"] or found["open_mpi"]
    if slots is not None and not 0 < int(slots[:9]) < MAX_RANKS:
        raise ValueError(f"{text!r} in {where} gives the host {slots} ranks")
    return Host(found["name"], None if slots is None else int(slots))


def _merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Merge the entries of a host that is named several times; their slots add up."""
    merged: dict[str, Host] = {}
    for host in hosts:
        if host.name in merged:
            before = merged[host.name].slots
            host = Host(host.name, (before or 1) + (host.slots or 1))
        merged[host.name] = host
    return tuple(merged.values())

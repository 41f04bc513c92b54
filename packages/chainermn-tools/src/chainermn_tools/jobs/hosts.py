"""Host lists and hostfiles, and how many ranks each host gets."""

from __future__ import annotations

import contextlib
import functools
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chainermn_tools.jobs.process import Unavailable, check_output

# A name server that is down never answers; other name servers take less time.
LOOKUP_SECONDS = 3.0
# A host's name must not look like an option to ssh, or like anything but a word to a
# shell.
HOST_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
# `host`; or with a number of ranks `host:2`, as MPICH writes it, or `host slots=2`, as
# Open MPI does.
LINE = re.compile(rf"({HOST_NAME.pattern})(?:(?::|\s+slots\s*=\s*)([1-9]\d{{0,5}}))?")


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it may get."""

    name: str  # or an address
    slots: int | None  # None if no number was given


@functools.cache
def is_here(name: str) -> bool:
    """Return whether this is a name or an address of this machine."""
    if socket.gethostname() in (name, name.split(".")[0]) or name == "localhost":
        return True
    with contextlib.suppress(Unavailable, OSError):
        # A program, because a look-up in this process would have no time limit.
        found = check_output(["getent", "ahostsv4", name], LOOKUP_SECONDS).split()
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.bind((found[0], 0))  # nobody can have another machine's address
            return True
    return False


def parse_host_list(text: str) -> tuple[Host, ...]:
    """Parse a list of hosts, as in ``a,b`` or ``a:2,b:4``; raise ValueError for other texts."""
    return _parse(text.split(","), f"--hosts {text!r}")


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """Parse the text of a hostfile of MPICH or Open MPI: a host on each line, and comments.

    Raise ValueError if a line is no host, or there is none.
    """
    lines = [line.partition("#")[0] for line in text.splitlines()]
    hosts = _parse(filter(str.strip, lines), path)
    if not hosts:
        raise ValueError(f"{path} names no host")
    return hosts


def _parse(texts: Iterable[str], where: str) -> tuple[Host, ...]:
    """Return the hosts; the slots of a host that is named several times add up."""
    slots: dict[str, int | None] = {}
    for text in texts:
        found = LINE.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"{text!r} in {where} is no host; write a name or an address, and its "
                "number of ranks after a colon, as in host:4"
            )
        number = int(found[2]) if found[2] else None
        if found[1] in slots:
            number = (slots[found[1]] or 1) + (number or 1)
        slots[found[1]] = number
    return tuple(Host(name, number) for name, number in slots.items())


def assign_slots(hosts: Sequence[Host], ranks: int | None) -> dict[str, int]:
    """Return how many ranks each host gets, without the hosts that get none.

    Hosts are filled in their order; without numbers of slots they share the ranks
    evenly. None for the ranks stands for all slots. Raise ValueError if the ranks don't
    fit.
    """
    slots = {host.name: host.slots or 1 for host in hosts}
    if ranks is None:
        return slots
    fit = sum(slots.values())
    if all(host.slots is None for host in hosts):
        each, more = divmod(ranks, len(hosts))
        for number, name in enumerate(slots):
            slots[name] = each + int(number < more)
    elif ranks > fit:
        first = hosts[0].name
        raise ValueError(
            f"{ranks} ranks don't fit: the hosts allow {fit}. Use -n {fit}, or write "
            f"{first}:{slots[first] + ranks - fit}."
        )
    shares = {}
    for name, most in slots.items():
        share = min(most, ranks)
        ranks -= share
        if share:
            shares[name] = share
    return shares

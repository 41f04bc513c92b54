"""The addresses on which the first machine's monitor listens to those of the others."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

# Monitors of all machines connect at about the same time.
BACKLOG = 4096
# Of Linux: the address of an interface; the scope of IPv6 addresses that are no link's or host's.
SIOCGIFADDR, GLOBAL_SCOPE = 0x8915, "00"


def own_addresses() -> list[str]:
    """Return this machine's IPv4 and global IPv6 addresses, but for the loopback's."""
    found = []
    # It fails where no file is left.
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    with contextlib.suppress(OSError):  # the kernel has no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, *_ = line.split()
            if scope == GLOBAL_SCOPE:
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]


def addresses_towards(own: list[str], hosts: Iterable[list[str]]) -> list[str]:
    """Return this machine's addresses from which packets go to hosts with these `own_addresses`."""
    found = set()
    for addresses in hosts:
        # An address that both have is a bridge's, unless they share all (containers of a machine).
        theirs = [address for address in addresses if address not in own] or addresses
        found |= {_source_address(address) for address in theirs}
    return sorted(found - {""})


def _source_address(target: str) -> str:
    """Return the address that packets to another one come from; "" if there is no route."""
    with contextlib.suppress(OSError), socket.socket(_family(target), socket.SOCK_DGRAM) as probe:
        probe.connect((target, 9))  # nothing is sent
        return str(probe.getsockname()[0])
    return ""


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(addresses: list[str]) -> list[socket.socket]:
    """Return a listening socket for each of these addresses that allows it; OSError for none."""
    listeners = []
    for address in addresses:
        with contextlib.suppress(OSError):  # such as an IPv6 address that isn't ready
            where = (address, 0)
            listeners.append(socket.create_server(where, family=_family(address), backlog=BACKLOG))
    if not listeners:
        known = ", ".join(addresses) or "none has a route to the job's other hosts"
        raise OSError(f"no address to listen on ({known})")
    return listeners

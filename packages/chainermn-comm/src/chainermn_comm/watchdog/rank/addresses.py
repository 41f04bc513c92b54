"""Where the first machine's monitor listens to those of the others."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
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


def listen() -> socket.socket:
    """Return a socket that listens on all addresses; OSError where there can be none."""
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), backlog=BACKLOG)
    family = socket.AF_INET6
    return socket.create_server(("", 0), family=family, backlog=BACKLOG, dualstack_ipv6=True)

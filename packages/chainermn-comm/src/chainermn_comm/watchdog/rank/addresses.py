"""The addresses at which other machines reach this one."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct

SIOCGIFADDR = 0x8915  # Linux's request for the address of an interface


def own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses, but for the loopback's."""
    found = []
    # It fails where no file is left.
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    return [address for address in dict.fromkeys(found) if not address.startswith("127.")]

"""What each monitor of a job knows of all machines: a record of the same length for each."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

# Of a machine: ranks that are named, and addresses on which its monitor listens.
MOST_RANKS, MOST_ENDPOINTS = 8, 4
# Name (Linux allows 64 bytes), number of ranks, and the first ones.
HEAD = struct.Struct(f"<64sI{MOST_RANKS}i")
# Family (0: none), address, port.
ENDPOINT = struct.Struct("<B16sH")
RECORD_BYTES = HEAD.size + MOST_ENDPOINTS * ENDPOINT.size
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
ADDRESS_BYTES = {4: 4, 6: 16}


class Machine(NamedTuple):
    """A machine, and how its monitor can be queried."""

    host: str  # its name
    num_ranks: int
    ranks: tuple[int, ...]  # the first of them, by their numbers in MPI.COMM_WORLD
    endpoints: tuple[tuple[str, int], ...]  # addresses and ports; none where it can't listen

    @property
    def name(self) -> str:
        """Its ranks and its name, for reports."""
        listed = ", ".join(map(str, self.ranks)) + ", ..." * (self.num_ranks > len(self.ranks))
        return f"rank{'s' * (self.num_ranks > 1)} {listed} on {self.host}"


def pack(host: str, ranks: list[int], endpoints: list[tuple[str, int]]) -> bytes:
    """Return the record of a machine; what is too much for it is left out."""
    first = ranks[:MOST_RANKS]
    filled = [*first, *[-1] * (MOST_RANKS - len(first))]
    record = HEAD.pack(host.encode()[:64], len(ranks), *filled)
    for address, port in endpoints[:MOST_ENDPOINTS]:
        family = 6 if ":" in address else 4
        record += ENDPOINT.pack(family, socket.inet_pton(FAMILIES[family], address), port)
    return record.ljust(RECORD_BYTES, b"\0")


def unpack(records: bytes, number: int) -> Machine:
    """Return the machine of this number."""
    start = number * RECORD_BYTES
    host, num_ranks, *ranks = HEAD.unpack_from(records, start)
    rows = (
        ENDPOINT.unpack_from(records, start + HEAD.size + row * ENDPOINT.size)
        for row in range(MOST_ENDPOINTS)
    )
    endpoints = tuple(
        (socket.inet_ntop(FAMILIES[family], address[: ADDRESS_BYTES[family]]), port)
        for family, address, port in rows
        if family
    )
    name = host.rstrip(b"\0").decode(errors="replace")
    return Machine(name, num_ranks, tuple(ranks[:num_ranks]), endpoints)

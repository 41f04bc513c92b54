"""What each rank runs whose place is looked at: it says where it is, before MPI and with it.

python placed.py SECONDS
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from chainermn_tools.doctor.hosts.remote import MARK


def main() -> None:
    """Say which host this is, start MPI, and let rank 0 say where all are."""
    # Its default action ends a process even while it is stuck in C.
    signal.alarm(int(float(sys.argv[1])))
    host = socket.gethostname()
    _say(began=host)
    from mpi4py import MPI

    hosts = MPI.COMM_WORLD.allgather(host)
    if MPI.COMM_WORLD.rank == 0:
        _say(hosts=hosts)
    MPI.Finalize()


def _say(**record: object) -> None:
    # In one piece, and on a line of its own, since others write too.
    os.write(1, f"\n{MARK}{json.dumps(record)}\n".encode())


if __name__ == "__main__":
    main()

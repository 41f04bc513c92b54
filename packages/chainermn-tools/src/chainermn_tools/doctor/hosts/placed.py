"""What each rank runs that is started on the hosts: it says where it is, and what it tries there.

    python placed.py JOB

JOB is JSON: ``seconds`` after which the rank ends itself, ``pairs`` and ``communicators`` as
:mod:`chainermn_tools.doctor.hosts.exchanging` wants them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from chainermn_tools.doctor.hosts.remote import MARK


def main() -> None:
    """Say which host this is, start MPI, let rank 0 say where all are, and exchange data."""
    job = json.loads(sys.argv[1])
    # Its default action ends a process even while it is stuck in C.
    signal.alarm(int(job["seconds"]))
    host = socket.gethostname()
    _say(began=host)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hosts = world.allgather(host)
    if world.rank == 0:
        _say(hosts=hosts)
    if job["pairs"] or job["communicators"]:
        from chainermn_tools.doctor.hosts import exchanging

        if exchanging.messages(world, hosts, job["pairs"], _say):
            exchanging.communicators(world, job["communicators"], _say)
    MPI.Finalize()


def _say(**record: object) -> None:
    # In one piece, and on a line of its own, since others write too.
    os.write(1, f"\n{MARK}{json.dumps(record)}\n".encode())


if __name__ == "__main__":
    main()

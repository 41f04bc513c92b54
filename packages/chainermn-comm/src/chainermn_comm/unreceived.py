"""Messages that a rank was sent and never received are named when its communicator ends."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from mpi4py import MPI


def say_unreceived_at_the_end(
    comm: MPI.Intracomm, max_tag: int, interruptions: list[str], resources: ExitStack
) -> None:
    """Report a message left in ``comm`` when ``resources`` are closed, or at the process's end.

    After interruptions nothing is printed, since they leave messages. Greater tags than
    ``max_tag`` are those of collective operations, which a background thread may still
    carry out at the process's end. The function is not collective.
    """
    say = partial(_say_unreceived, comm, max_tag, interruptions, os.getpid())
    atexit.register(say)
    resources.callback(atexit.unregister, say)
    resources.callback(say)


def _say_unreceived(
    comm: MPI.Intracomm, max_tag: int, interruptions: list[str], process: int
) -> None:
    # A forked child can't use MPI.
    if interruptions or os.getpid() != process or MPI.Is_finalized():
        return
    messages = list(_discarded(comm, max_tag))
    if messages:
        source, tag = messages[0]
        print(
            f"ChainerMN: rank {comm.rank} never received a message that rank {source} sent with "
            f"tag {tag} ({len(messages)} such messages in all): call recv once for each send; in "
            "a MultiNodeChainList, a component's rank_out needs another's rank_in",
            file=sys.stderr,
            flush=True,
        )


def _discarded(comm: MPI.Intracomm, max_tag: int) -> Iterator[tuple[int, int]]:
    """Yield the source and tag of each message left, and discard the message.

    MPI may use the freed communicator's number again, and then take the message for one
    of the new communicator.
    """
    status = MPI.Status()
    comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # MPI looks for messages after its answer
    while comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status) and status.tag <= max_tag:
        comm.Recv([bytearray(status.count), MPI.BYTE], status.source, status.tag)
        yield status.source, status.tag

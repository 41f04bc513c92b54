"""The program of each rank that the doctor starts: it reports facts, and then tries everything.

    python -m chainermn_tools.doctor.rank_program ORDER

ORDER is JSON: the ``seconds`` after which the rank ends itself, the number of ``ranks``
that were asked for, and the names of the ``communicators`` to try. Every step is
reported by an event, so that the launcher knows it however the rank ends.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

from chainermn_tools import environment
from chainermn_tools.long_events import emit

EVENT = "doctor"  # the kind of these events
# The steps before the communicators', in their order: the first one needs no MPI.
FACTS = "facts"
START = "start"
MEET = "meet"
MESSAGES = "messages"
END = "end"


def on_gpus(communicator: str) -> str:
    """Return the name of the step that tries a communicator on GPUs."""
    return f"{communicator} on GPUs"


def main() -> None:
    order = json.loads(sys.argv[1])
    # The signal's default action ends a process even while it is stuck in C.
    signal.alarm(order["seconds"])
    _report(FACTS, environment.rank_facts())
    from mpi4py import MPI  # starts MPI

    world = MPI.COMM_WORLD
    _report(START, {"size": world.size, "level": environment.thread_level()})
    if world.size == order["ranks"]:
        world.allgather(world.rank)
        _report(MEET, {})
        _try_all(world, order["communicators"])
    MPI.Finalize()
    _report(END, {})


def _try_all(world: Any, communicators: Sequence[str]) -> None:
    from chainermn_tools.doctor import rank_tests

    _report(MESSAGES, rank_tests.try_messages(world))
    for name in communicators:
        _report(name, rank_tests.try_communicator(world, name))
    for name in communicators:
        _report(on_gpus(name), rank_tests.try_on_gpus(world, name))


def _report(step: str, result: dict[str, Any]) -> None:
    emit(EVENT, step=step, result=result)


if __name__ == "__main__":
    main()

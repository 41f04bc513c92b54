"""Communicators, one of them a stranger's, and random arrays that are the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


def strangers_communicator() -> Any:
    """One that somebody else wrote, of which model parallelism may use the public methods only."""
    from mpi4py import MPI

    from chainermn_comm import CommunicatorBase

    def send(self: Any, data: Any, dest: int, tag: int) -> None:
        MPI.COMM_WORLD.send(data, dest, tag)

    def recv(self: Any, source: int, tag: int) -> Any:
        return MPI.COMM_WORLD.recv(source=source, tag=tag)

    def bcast(self: Any, data: Any, max_buf_len: int | None = None, root: int = 0) -> Any:
        return MPI.COMM_WORLD.bcast(data, root)

    def gather(self: Any, data: Any, root: int = 0) -> Any:
        return MPI.COMM_WORLD.gather(data, root)

    def alltoall(self: Any, xs: Any) -> Any:
        return MPI.COMM_WORLD.alltoall(xs)

    def allreduce(self: Any, data: Any) -> Any:
        return sum(MPI.COMM_WORLD.allgather(data))

    def unused(self: Any, *arguments: Any) -> Any:
        raise AssertionError("not a method that model parallelism has a use for")

    members: dict[str, Any] = dict.fromkeys(CommunicatorBase.__abstractmethods__, unused)
    members |= {"send": send, "recv": recv, "send_obj": send, "recv_obj": recv}
    members |= {"bcast": bcast, "bcast_obj": bcast, "gather": gather, "gather_obj": gather}
    members |= {"alltoall": alltoall, "allreduce": allreduce}
    members |= {name: getattr(MPI.COMM_WORLD, name) for name in ("rank", "size")}
    return type("Stranger", (CommunicatorBase,), members)()


@pytest.fixture(params=["naive", "stranger"])
def comm(request: pytest.FixtureRequest) -> Iterator:
    """A communicator over all ranks."""
    from chainermn_comm import create_communicator

    stranger = request.param == "stranger"
    with strangers_communicator() if stranger else create_communicator("naive") as communicator:
        yield communicator


@pytest.fixture
def random() -> np.random.Generator:
    """The same numbers on each rank, so that each can compute the single-process equivalent."""
    return np.random.default_rng(20261120)

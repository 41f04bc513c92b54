"""The start of many ranks over the double of `thread_ranks`, whose monitors aren't launched."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from chainermn_comm import Topology
from chainermn_comm.messaging import Handshake
from chainermn_comm.runtime import blas_threads
from chainermn_comm.trace import tracer as traced
from chainermn_comm.watchdog.rank import rendezvous
from chainermn_comm.watchdog.timeout import Timeout
from tests.watchdog.thread_ranks import CountedComm, run


class Start:
    """What each of many ranks found at its start.

    Attributes:
        counts: what each rank has received, and of whom.
        monitors: by the leader's rank, how its monitor was to be launched.
        identities: by rank, how it calls its communicator in its records.
        topologies: by rank.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        size: int,
        ranks_per_node: int,
        addresses: list[str],
        ranks_per_namespace: int,
    ) -> None:
        self.monitors: dict[int, dict[str, Any]] = {}
        rank_of = threading.local()

        def launch(config: dict[str, Any]) -> None:
            self.monitors[rank_of.rank] = config

        recorder = SimpleNamespace(
            region=lambda: SimpleNamespace(
                is_monitored=False,
                file=3,
                stacks=4,
                namespace=rank_of.rank // ranks_per_namespace,
                liveness_pipe=(5, 6),
                signal=40,
            ),
            allocate=lambda communicator, rank, size: (communicator, rank, size),
        )
        monkeypatch.setattr(rendezvous, "recorder", recorder)
        monkeypatch.setattr(rendezvous, "_launch_monitor", launch)
        monkeypatch.setattr(rendezvous, "own_addresses", lambda: addresses)
        monkeypatch.setattr(blas_threads, "allowed_threads", lambda _: 1)
        monkeypatch.setattr(blas_threads.os, "environ", dict(os.environ))

        def start(comm: CountedComm) -> tuple[Any, Topology]:
            rank_of.rank = comm.rank
            Handshake(comm)("create_communicator")  # type: ignore[arg-type]
            blas_threads.limit_blas_threads(comm)  # type: ignore[arg-type]
            identity = rendezvous.register(comm, comm.rank, Timeout())  # type: ignore[arg-type]
            return identity, Topology.discover(comm)  # type: ignore[arg-type]

        found, self.counts = run(size, ranks_per_node, start)
        self.identities = [identity for identity, _ in found]
        self.topologies = [topology for _, topology in found]


def started(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    ranks_per_node: int,
    addresses: list[str],
    ranks_per_namespace: int = 1 << 20,
) -> Start:
    """The start of ranks on machines that all have these addresses, and maybe containers."""
    with monkeypatch.context() as patched:
        return Start(patched, size, ranks_per_node, addresses, ranks_per_namespace)


def compared_clocks(size: int) -> list[tuple[float, float, float]]:
    """What ranks find when they compare their clocks."""
    found, _ = run(size, 1, traced._measure_clock)  # type: ignore[arg-type]
    return found

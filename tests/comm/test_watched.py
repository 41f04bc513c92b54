"""A communicator's ranks are watched: without a monitor no stall would ever be reported."""

from __future__ import annotations

import os

import pytest

from chainermn_comm import create_communicator
from tests.support.watchdog.records import monitors_of, reads_our_calls

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]


def test_a_monitor_watches_each_rank(world, monkeypatch):
    monkeypatch.delenv("CHAINERMN_TIMEOUT", raising=False)
    with create_communicator("naive") as comm:
        comm.allreduce_obj(1)
        ranks = set(map(str, world.allgather(os.getpid())))
        monitors = monitors_of(ranks)
        assert any(reads_our_calls(one.pid) for one in monitors), monitors

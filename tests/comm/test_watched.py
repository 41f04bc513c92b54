"""A communicator's ranks are watched: without a monitor no stall would ever be reported."""

from __future__ import annotations

import os

import pytest

from chainermn_comm import create_communicator
from tests.support.jobs.processes import soon
from tests.support.watchdog.records import monitors_of, reads_our_calls

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]


def test_a_monitor_and_its_supervisor_watch_each_rank(world, monkeypatch):
    monkeypatch.delenv("CHAINERMN_TIMEOUT", raising=False)
    with create_communicator("naive") as comm:
        comm.allreduce_obj(1)
        mine = {str(os.getpid())}
        found = soon(lambda: len(them := monitors_of(mine)) == 2 and them)
        assert found, monitors_of(mine)
        monitor, supervisor = sorted(found, key=lambda one: one.parent() not in found)
        assert monitor.parent() == supervisor
        assert reads_our_calls(monitor.pid)

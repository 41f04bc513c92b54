"""Where a monitor prints."""

from __future__ import annotations

import time

import pytest

from chainermn_comm.watchdog.monitor import printing
from tests.support.watchdog.records import description, monitored


@pytest.mark.ci
def test_launchers_that_read_nothing_keep_the_end_waiting_once_and_not_for_each_rank(
    monkeypatch,
):
    def in_vain(_, text, seconds, events=()):
        time.sleep(max(0.0, seconds))
        given.append(max(0.0, seconds))
        return False

    given: list[float] = []
    ranks = [monitored(description(0))]
    monkeypatch.setattr(printing, "standard_errors", lambda pids: range(50))
    monkeypatch.setattr(printing, "PRINT_SECONDS", 5.0)
    monkeypatch.setattr(printing.processes, "write", in_vain)
    printing.print_for(ranks, "words")
    assert len(given) == 50 + 1  # and the monitor's own standard error
    assert given[0] > 0
    assert sum(given) <= 5.0

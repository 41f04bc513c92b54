"""The process that runs a monitor, and another one where that fails."""

from __future__ import annotations

from chainermn_comm.watchdog.monitor import process
from tests.support.watchdog import MonitoredRank, description


def test_a_monitor_that_fails_is_started_again_and_at_last_the_ranks_are_told(monkeypatch, capfd):
    class Failing:
        def __init__(self, *_):
            raise KeyError("planted")

    ranks = [MonitoredRank(description(0))]
    monkeypatch.setattr(process, "Monitor", Failing)
    process.supervise({}, ranks)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == process.ATTEMPTS + 1
    assert all("failed: KeyError: 'planted'" in line for line in told[:-1])
    assert told[-1].startswith("ChainerMN: the process that watches the ranks on ")
    assert told[-1].endswith("no call will be reported any more.")

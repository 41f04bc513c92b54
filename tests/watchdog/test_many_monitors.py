"""A star of 1,024 monitors in one process: one report, whatever happens to one machine."""

from __future__ import annotations

import pytest

from tests.support.monitors import simulation

SIZE = 1024
SECONDS, SILENCE = 6.0, 3.0
# For a thread among so many to be late.
LATE = 10.0


def start(made):
    """All are connected, and all ranks but the last one wait in a call."""
    hub, *spokes = made.monitors
    assert made.until(lambda: all(one.spoke.is_connected for one in spokes), 30.0)
    assert len(hub.hub.connected) == SIZE - 1
    for rank in made.ranks[:-1]:
        rank.enter()


@pytest.mark.parametrize("ends_job", [False, True])
def test_a_rank_that_does_not_come_gets_one_warning_and_one_report(ends_job):
    with simulation(SIZE, seconds=SECONDS, ends_job=ends_job, silence=SILENCE) as made:
        start(made)
        assert not made.until(lambda: len(made.printed) == 2, SECONDS - 0.1)
        assert made.until(lambda: len(made.printed) == 2, LATE), made.printed
        assert made.until(lambda: len(made.ended) == SIZE * ends_job, LATE), len(made.ended)
        assert not made.until(lambda: len(made.printed) > 2, 2.0)  # nobody else says anything
        (one, warning), (other, report) = made.printed
    assert one == other == 0
    assert f"rank {SIZE - 1} (process" in warning
    assert f"likely culprit: rank {SIZE - 1} (process" in report
    assert "didn't answer" not in report
    assert "and so do 991 more ranks" in report


def test_a_machine_that_is_lost_is_reported_by_the_hub_and_by_itself_alone():
    with simulation(SIZE, seconds=600.0, ends_job=True, silence=SILENCE) as made:
        start(made)
        made.cut(SIZE - 1)
        assert made.until(lambda: len(made.ended) == SIZE - 1, SILENCE + LATE), len(made.ended)
        made.ranks[-1].enter()  # it gets to the call, too
        assert made.until(lambda: len(made.ended) == SIZE, SILENCE + LATE)
        (one, said), (other, own) = made.printed
    assert (one, other) == (0, SIZE - 1)
    assert f"nothing was heard of rank {SIZE - 1} on host{SIZE - 1} for 3.0 s, and calls" in said
    assert "nothing was heard of rank 0 on host0 for 3.0 s, and calls wait" in own


def test_a_lost_machine_ends_nothing_while_calls_go_on_or_where_none_waits():
    with simulation(3, seconds=600.0, ends_job=True, silence=1.0) as made:
        assert made.until(lambda: made.monitors[2].spoke.is_connected, LATE)
        made.cut(2)
        for seconds in (0.6, 0.6, 0.6, 2.0, 2.0):  # by another network
            for rank in made.ranks:
                rank.enter()
            made.until(lambda: False, seconds)
        assert made.printed == []
        for rank in made.ranks:
            rank.waits = False
        assert not made.until(lambda: made.ended or made.printed, 3.0)

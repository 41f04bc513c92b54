"""A star of many monitors in one process: one report, whatever happens to one machine."""

from __future__ import annotations

import pytest

from tests.support.watchdog.monitors import simulation

pytestmark = pytest.mark.ci

SIZES = pytest.mark.parametrize(
    "size", [128, pytest.param(1024, marks=pytest.mark.full)]
)
SECONDS, SILENCE = 6.0, 3.0
# For a thread among so many to be late.
LATE = 10.0


def start(made, size):
    """All are connected, and all ranks but the last one wait in a call."""
    hub, *spokes = made.monitors
    assert made.until(lambda: all(one.star.links for one in spokes), 30.0)
    assert len(hub.star.links) == size - 1
    for rank in made.ranks[:-1]:
        rank.enter()


@SIZES
@pytest.mark.parametrize("ends_job", [False, True])
def test_a_rank_that_does_not_come_gets_one_warning_and_one_report(size, ends_job):
    with simulation(size, seconds=SECONDS, ends_job=ends_job, silence=SILENCE) as made:
        start(made, size)
        assert not made.until(lambda: len(made.printed) == 2, SECONDS - 0.1)
        assert made.until(lambda: len(made.printed) == 2, LATE), made.printed
        assert made.until(lambda: len(made.ended) == size * ends_job, LATE), len(
            made.ended
        )
        # Nobody else says anything.
        assert not made.until(lambda: len(made.printed) > 2, 2.0)
        (one, warning), (other, report) = made.printed
    assert one == other == 0
    assert f"rank {size - 1} (process" in warning
    assert f"likely culprit: rank {size - 1} (process" in report
    assert "didn't answer" not in report
    assert f"and so do {size - 33} more ranks" in report


@SIZES
def test_a_machine_that_is_lost_is_reported_by_the_hub_and_by_itself_alone(size):
    with simulation(size, seconds=600.0, ends_job=True, silence=SILENCE) as made:
        start(made, size)
        made.cut(size - 1)
        assert made.until(lambda: len(made.ended) == size - 1, SILENCE + LATE), len(
            made.ended
        )
        made.ranks[-1].enter()  # it gets to the call, too
        assert made.until(lambda: len(made.ended) == size, SILENCE + LATE)
        (one, said), (other, own) = made.printed
    assert (one, other) == (0, size - 1)
    assert (
        f"nothing was heard of rank {size - 1} on host{size - 1} for 3.0 s, and rank "
        in said
    )
    assert "nothing was heard of rank 0 on host0 for 3.0 s, and rank " in own


def test_a_lost_machine_ends_nothing_while_calls_go_on_or_where_none_waits():
    with simulation(3, seconds=600.0, ends_job=True, silence=1.0) as made:
        assert made.until(lambda: made.monitors[2].star.links, LATE)
        made.cut(2)
        for seconds in (0.6, 0.6, 0.6, 2.0, 2.0):  # by another network
            for rank in made.ranks:
                rank.enter()
            made.until(lambda: False, seconds)
        assert made.printed == []
        for rank in made.ranks:
            rank.waits = False
        assert not made.until(lambda: made.ended or made.printed, 3.0)

"""The monitors of many machines in one process: one report, whatever happens to one machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.plugins.pairwise import in_full
from tests.support.watchdog.monitors import CUT, ENDED, limited, simulation
from tests.support.watchdog.records import clock

SECONDS = 6.0
SILENCE = 3.0
# For a thread among so many to be late.
LATE = 10.0


def start(made, size, absent=1):
    """All are connected, and all ranks but the last ones wait in a call."""
    assert made.until(lambda: made.num_linked == size - 1, 30.0)
    for rank in made.ranks[: size - absent]:
        rank.enter()


@pytest.mark.parametrize(
    ("size", "ends_job"),
    [
        (3, True),
        pytest.param(128, False, marks=pytest.mark.ci),
        *in_full((3, False), (128, True), (1024, False), (1024, True)),
    ],
)
def test_a_rank_that_does_not_come_gets_one_warning_and_one_report(size, ends_job):
    with simulation(size, seconds=SECONDS, ends_job=ends_job) as made:
        start(made, size)
        assert not made.until(lambda: len(made.printed) == 2, SECONDS - 0.1)
        assert made.until(lambda: len(made.printed) == 2, LATE), made.printed

        def have_ended():
            return len(made.ended) == size * ends_job

        assert made.until(have_ended, LATE), made.ended
        # Nobody else says anything.
        assert not made.until(lambda: len(made.printed) > 2, 2.0)
        (one, warning), (other, report) = made.printed
    assert one == other
    assert other == 0
    assert f"; rank {size - 1} (process" in warning
    assert f"likely culprit: rank {size - 1} (process" in report
    assert "didn't answer" not in report
    assert ("more ranks" in report) == (size > 33)


def test_the_first_machine_hears_of_a_call_that_waits_elsewhere_alone():
    with simulation(3, seconds=2.0, ends_job=True) as made:
        start(made, 3, absent=3)
        made.ranks[1].enter()
        assert made.until(lambda: len(made.ended) == 3, LATE), made.printed
        (number, report) = made.printed[-1]
    assert number == 0
    assert "  rank 1 (process " in report


@pytest.mark.parametrize(
    ("error", "seconds"),
    [(CUT, 600.0), pytest.param(CUT, 4.0, marks=pytest.mark.ci), (ENDED, 4.0)],
)
def test_a_machine_that_is_lost_is_reported_and_ends_by_itself(error, seconds):
    """After the silence where its link was cut, or the time-out."""
    with simulation(3, seconds=seconds, ends_job=True, silence=SILENCE) as made:
        start(made, 3)
        made.until(lambda: False, SILENCE - 0.5)
        made.cut(2, error)
        assert made.until(lambda: len(made.ended) == 2, 4.0 + LATE), made.printed
        (number, report) = made.printed[-1]
        assert number == 0
        assert "could not be asked; rank 2 on host2 didn't answer" in report
        assert "likely culprit" not in report
        limited(made.monitors[2], 1.0, True)
        made.ranks[2].enter()
        assert made.until(lambda: len(made.ended) == 3, LATE), made.printed
        (number, report) = made.printed[-1]
    assert number == 2
    assert "could not be asked; host0 didn't answer" in report


def test_a_monitor_that_answers_nothing_is_waited_for_a_moment_alone():
    """A process that was stopped keeps its links."""
    with simulation(2, seconds=2.0, ends_job=False) as made:
        start(made, 2)
        made.monitors[1].look = lambda: True
        assert made.until(lambda: len(made.printed) == 2, 2 * LATE), made.printed
        (_, report) = made.printed[-1]
    assert "could not be asked; rank 1 on host1 didn't answer" in report


@pytest.mark.parametrize("error", [CUT, pytest.param(ENDED, marks=pytest.mark.full)])
def test_a_lost_machine_ends_nothing_where_calls_go_on_or_a_known_rank_is_late(error):
    """Calls go on by another network, or where only a monitor was killed."""
    with simulation(3, seconds=600.0, ends_job=True, silence=1.0) as made:
        start(made, 3, absent=2)
        made.until(lambda: False, 1.5)  # rank 1, which can be reached, is waited for
        made.cut(2, error)
        assert not made.until(lambda: made.ended or made.printed, 2.0)
        for _ in range(4):
            for rank in made.ranks:
                rank.enter()
            made.until(lambda: False, 0.7)
        assert not made.until(lambda: made.ended or made.printed, 2.0)


@pytest.mark.parametrize(
    ("aborted", "printed"), [(None, "rank 2 (process"), (2, None), (1, "rank 2")]
)
def test_of_several_machines_the_first_rank_that_died_is_named(aborted, printed):
    """The launcher kills the others; one that called MPI_Abort has said why itself."""
    with simulation(3, seconds=0.0) as made:
        start(made, 3, absent=3)
        now = clock()
        for number in (1, 2):
            made.ranks[number].has_aborted = number == aborted
            made.ranks[number].failed_at = now - number
        if printed is None:
            assert not made.until(lambda: bool(made.printed), 1.5)
            return
        assert made.until(lambda: bool(made.printed), LATE)
        ((number, text),) = made.printed
    assert number == 0
    assert text.startswith(f"\nChainerMN: {printed}")


def test_the_first_rank_that_died_is_named_though_its_monitor_has_gone_since():
    with simulation(3, seconds=0.0) as made:
        start(made, 3, absent=3)
        made.cut(2, ENDED)
        # What its monitor has pushed before.
        for machine in made.monitors[0].other_machines.known:
            if machine.ranks[0].world == 2:
                machine.ranks = [replace(machine.ranks[0], failed_at=clock() - 1.0)]
        made.ranks[0].failed_at = clock()
        assert made.until(lambda: bool(made.printed), LATE)
        ((_, text),) = made.printed
    assert text.startswith("\nChainerMN: rank 2 (process")


def test_where_a_rank_called_mpi_abort_in_vain_the_job_ends_on_all_machines():
    """As where its launcher has lost the message."""
    with simulation(3, seconds=0.0) as made:
        start(made, 3)
        made.ranks[1].has_aborted = True
        made.ranks[1].failed_at = clock()
        assert not made.until(lambda: bool(made.ended), 2.5)
        assert made.until(lambda: len(made.ended) == 3, LATE)

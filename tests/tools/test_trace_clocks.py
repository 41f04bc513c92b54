"""How the clocks of ranks are compared, and with what certainty."""

import numpy as np
import pytest

from chainermn_tools.trace import clocks
from tests.support.tools.traces import Made, calls, unaligned


@pytest.mark.parametrize("drift", [5e-5, -5e-5])
def test_clocks_are_aligned_with_drift_and_over_other_ranks(tmp_path, drift):
    """Rank 2 was compared with 1, and 1 with 0, whose times are the true ones."""

    def clock(rank: int, true: float) -> float:
        return true * (1 + rank * drift) + rank * 1e9

    for rank in range(3):
        zero = clock(rank, 0.0)
        made = Made(tmp_path, rank, 3, clock=str(rank), zero=zero, began=99.0)
        if rank < 2:
            made.communicator("0.1", [0, 1])
        if rank > 0:
            made.communicator("0.2", [1, 2])
            for true in (1e3, 5e6, 60e6):
                # A file counts from its zero; `ahead` leads to the other's clock.
                at = clock(rank, true) - zero
                made.clock(f"0.{rank}", at, clock(rank - 1, true) - at, trip=1.0)
        for true in (30e6, 70e6):
            at = clock(rank, true) - zero
            made.call("a", at, at + 5, communicator="0.9")
        made.write()
    run = unaligned(tmp_path)
    assert clocks.align(run) == pytest.approx(1.0)
    assert run.warnings == []
    starts = [call.start for call in calls(run)]
    assert starts == pytest.approx([0, 40e6] * 3, abs=20)


def test_a_shared_clock_beats_a_measured_one(tmp_path):
    for rank in (0, 1):
        made = Made(tmp_path, rank, 2, zero=1000.0 * rank).communicator("0.1", [0, 1])
        made.clock("0.1", 5, 77777.0, trip=500.0).call("bcast", 10, 20).write()
    run = unaligned(tmp_path)
    assert clocks.align(run) == 0
    assert [call.start for call in calls(run)] == [0, 1000]


@pytest.mark.parametrize(("error", "added"), [(10.0, 10.0), (0.5, 1e5)])
def test_comparisons_too_close_for_a_slope_give_none(error, added):
    at = np.array([0.0, 1e4])
    offset = clocks.ClockOffset(1, 0, at, np.array([0.0, 10.0]), error)
    assert offset.apply(np.array([1e8])) == pytest.approx(1e8 + added)


def test_clocks_that_nobody_compared_go_by_the_time_of_day(tmp_path):
    Made(tmp_path, 0, 2, began=100.0).call("a", 0, 1).write()
    made = Made(tmp_path, 1, 2, began=102.5, clock="other").call("a", 0, 1)
    made.clock("0.1", 0, 7.0)  # on a communicator whose line is damaged
    made.metadata("chainermn communicator", communicator="0.1", ranks=[]).write()
    run = unaligned(tmp_path)
    clocks.align(run)
    assert [call.start for call in calls(run)] == [0, 2.5e6]
    assert "rank 1: its clock is only known by the time of day" in run.warnings

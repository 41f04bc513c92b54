"""What is made of readings: what each rank does, rates and shares, and the slowest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chainermn_tools.live import window
from tests.support.watchdog.records import (
    ENDED,
    GONE,
    STOPPED,
    inside,
    job_of,
    outside,
    ranks,
    receiving,
)

WAITS = "waiting 7 s in bcast for 1"


@pytest.mark.parametrize(
    ("calls", "states", "expected"),
    [
        (
            (inside(0), outside(1), inside(2)),
            {},
            [WAITS, "computing 7 s after bcast", WAITS],
        ),
        ((inside(0), inside(1), inside(2)), {}, ["on the wire 7 s in bcast"] * 3),
        (
            (receiving(0, 2), outside(1), outside(2)),
            {1: STOPPED, 2: GONE},
            [
                "waiting 7 s in recv for 2",
                "stopped 7 s after bcast",
                "gone 7 s after bcast",
            ],
        ),
        (((), ENDED), {}, ["computing", "ended 7 s in MPI_Finalize"]),
        # Of the third one nothing is known.
        ((inside(0), inside(1)), {}, ["waiting 7 s in bcast"] * 2),
    ],
)
def test_what_a_rank_does_is_in_words(calls, states, expected):
    graph = job_of(ranks(*calls, states=states))
    did = [window.activity(graph, rank) for rank in graph.ranks.values()]
    assert [window.in_words(each) for each in did] == expected


def moment(*called: bool):
    """The calls of ranks, of which these are inside their next `update`."""
    calls = []
    for rank, is_inside in enumerate(called):
        make = {True: inside, False: outside}[is_inside]
        calls.append(make(rank, operation="update"))
    return job_of(ranks(*calls))


def summary(*graphs, sort="rank"):
    """What is made of readings a second apart."""
    readings = [window.read(graph, float(at)) for at, graph in enumerate(graphs)]
    found = window.summary(readings, sort)
    return found["slowest"], {row.pop("rank"): row for row in found["ranks"]}


LATE = moment(True, False, True)  # rank 1 is waited for
LATER = moment(True, True, False)  # rank 2 is
TOGETHER = moment(True, True, True)
APART = moment(False, False, False)


def test_shares_are_counted_in_readings_and_the_slowest_is_waited_for_most():
    slowest, found = summary(LATE, LATE, LATER, TOGETHER, APART)
    assert slowest == 1
    shares = [
        (row["waiting"], row["waited_for"], row["wire"]) for row in found.values()
    ]
    assert shares == [(0.6, 0.0, 0.2), (0.2, 0.4, 0.2), (0.4, 0.2, 0.2)]
    assert summary(APART, APART)[0] is None
    assert summary(LATE, LATER)[0] is None
    assert summary(job_of(())) == (None, {})


def test_of_those_that_hang_the_likelier_one_is_the_slowest():
    graph = job_of(ranks(inside(0), outside(1), outside(2), states={2: STOPPED}))
    assert summary(graph)[0] == 2


@pytest.mark.parametrize(
    ("counts", "steps", "examples"),
    [
        ([(7, 70), (15, 150), (27, 270)], 10.0, 100.0),
        ([(7, 70), (27, 70)], 20.0, None),
    ],
)
def test_steps_are_updates_a_second_and_examples_those_in_them(counts, steps, examples):
    (rank,) = ranks(outside(0, size=1))
    graphs = [job_of([replace(rank, updates=u, examples=e)]) for u, e in counts]
    row = summary(*graphs)[1][0]
    assert (row["steps_per_second"], row["examples_per_second"]) == (steps, examples)


def test_ranks_are_sorted_by_number_or_the_largest_first():
    for sort in ("rank", "steps_per_second"):  # of which none is known
        assert list(summary(LATE, sort=sort)[1]) == [0, 1, 2]
    assert list(summary(LATE, sort="waited_for")[1]) == [1, 0, 2]


class Clock:
    """The time, which passes only where somebody is asked or sleeps."""

    def __init__(self, cost: float):
        self.now = 0.0
        self.cost = cost  # of an answer
        self.pauses: list[float] = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds

    def ask(self, *_):
        self.now += self.cost
        return APART


@pytest.mark.parametrize(("cost", "pause", "times"), [(0.01, 0.5, 4), (2.5, 2.0, 1)])
def test_readings_are_apart_by_what_they_cost_and_a_summary_comes_every_two_seconds(
    monkeypatch, cost, pause, times
):
    """Where another host is silent an answer takes long."""
    clock = Clock(cost)
    monkeypatch.setattr(window, "time", clock)
    monkeypatch.setattr(window, "ask", clock.ask)
    made = window.summaries(window.LiveJob(7, "python train.py", "", [8], {7}), "rank")
    for _ in range(2):
        found = next(made)
        assert (found["job"], found["command"]) == (7, "python train.py")
    assert clock.pauses == pytest.approx([pause] * len(clock.pauses))
    assert len(clock.pauses) == pytest.approx(2 * times, abs=1)

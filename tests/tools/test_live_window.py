"""What is made of readings: what each rank does, rates and shares, and the slowest."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest

from chainermn_tools.live import window
from tests.support.watchdog.watched_ranks import (
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


def activities(*calls, **how):
    graph = job_of(ranks(*calls, **how))
    return [window.activity(graph, rank) for rank in graph.ranks.values()]


def words(*calls, **how):
    return [window.in_words(it) for it in activities(*calls, **how)]


@pytest.mark.parametrize(
    ("calls", "states", "expected"),
    [
        (
            (inside(0), outside(1), inside(2)),
            {},
            [
                "waiting 7 s in bcast for 1",
                "computing 7 s after bcast",
                "waiting 7 s in bcast for 1",
            ],
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
        (((), ENDED), {}, ["computing", "ended 7 s in MPI_Finalize for 0"]),
        # Of the third one nothing is known.
        ((inside(0), inside(1)), {}, ["waiting 7 s in bcast"] * 2),
    ],
)
def test_what_a_rank_does_is_in_words(calls, states, expected):
    assert words(*calls, states=states) == expected


def readings(*moments):
    """Readings a second apart, of all ranks' calls."""
    return [
        window.read(job_of(ranks(*calls)), float(at))
        for at, calls in enumerate(moments)
    ]


def updating(rank, sequence, is_inside=False, **how):
    return (inside if is_inside else outside)(rank, sequence, operation="update", **how)


def test_shares_are_counted_in_readings_and_the_slowest_is_waited_for_most():
    late = tuple(updating(rank, 5 - (rank == 1), rank != 1) for rank in range(3))
    later = tuple(updating(rank, 6 - (rank == 2), rank != 2) for rank in range(3))
    together = tuple(updating(rank, 7, True) for rank in range(3))
    apart = tuple(updating(rank, 7) for rank in range(3))
    found = window.summary(readings(late, late, later, together, apart))
    assert found["slowest"] == 1
    assert [it["waiting"] for it in found["ranks"]] == [0.6, 0.2, 0.4]
    assert [it["wire"] for it in found["ranks"]] == [0.2] * 3
    assert [it["waited_for"] for it in found["ranks"]] == [0.0, 0.4, 0.2]
    found = window.summary(readings(apart, apart))
    assert found["slowest"] is None


def test_of_those_that_are_waited_for_as_often_the_likelier_one_is_the_slowest():
    graph = job_of(ranks(inside(0), outside(1), outside(2), states={2: STOPPED}))
    assert window.summary([window.read(graph, 0.0)])["slowest"] == 2


def counting(*counts):
    """What a rank is seen to count a second, given its updates and examples in each reading."""
    (rank,) = ranks(outside(0, size=1))
    moments = (job_of([replace(rank, updates=it[0], examples=it[1])]) for it in counts)
    found = window.summary(
        [window.read(graph, float(at)) for at, graph in enumerate(moments)]
    )
    return [found["ranks"][0][f"{what}_per_second"] for what in ("steps", "examples")]


def test_steps_are_updates_a_second_and_examples_those_in_them():
    assert counting((7, 70), (15, 150), (27, 270)) == [10.0, 100.0]
    assert counting((7, 70), (27, 70)) == [20.0, None]
    assert counting((7, 70), (7, 70)) == [None, None]
    assert counting((7, 70)) == [None, None]


def test_ranks_are_sorted_by_number_or_the_largest_first():
    late = tuple(updating(rank, 5 - (rank == 1), rank != 1) for rank in range(3))
    found = readings(late)
    assert [it["rank"] for it in window.summary(found)["ranks"]] == [0, 1, 2]
    assert [it["rank"] for it in window.summary(found, "waited_for")["ranks"]] == [
        1,
        0,
        2,
    ]
    assert [
        it["rank"] for it in window.summary(found, "steps_per_second")["ranks"]
    ] == [0, 1, 2]


def test_memory_is_known_of_ranks_on_this_host(monkeypatch):
    graph = job_of(ranks(outside(0)))
    (found,) = window.summary([window.read(graph, 0.0)])["ranks"]
    assert (found["host"], found["memory_bytes"]) == ("here", None)
    (rank,) = graph.ranks.values()
    own = vars(rank) | {"host": os.uname().nodename, "pid": os.getpid()}
    graph = job_of([type(rank)(**own)])
    (found,) = window.summary([window.read(graph, 0.0)])["ranks"]
    assert found["memory_bytes"] > 1 << 20


def test_readings_are_apart_by_what_they_cost_and_a_summary_comes_every_two_seconds(
    monkeypatch,
):
    now, pauses = [0.0], []

    def ask(*_):
        now[0] += 0.01
        return job_of(ranks(updating(0, int(100 * now[0]))))

    def sleep(seconds):
        pauses.append(round(seconds, 6))
        now[0] += seconds

    monkeypatch.setattr(window, "ask", ask)
    monkeypatch.setattr(window.time, "sleep", sleep)
    monkeypatch.setattr(window.time, "monotonic", lambda: now[0] + 1.0)
    made = window.summaries(window.LiveJob(7, "python train.py", [8]), "rank")
    for summary in (next(made), next(made)):
        assert (summary["job"], summary["command"]) == (7, "python train.py")
    assert Counter(pauses) == {0.5: len(pauses)}
    assert len(pauses) == 8


def test_an_answer_that_takes_long_lets_nobody_wait_for_longer_than_a_summary(
    monkeypatch,
):
    now, pauses = [0.0], []

    def ask(*_):
        now[0] += 2.5  # as where another host is silent
        return job_of(ranks(updating(0, 1)))

    monkeypatch.setattr(window, "ask", ask)
    monkeypatch.setattr(window.time, "sleep", pauses.append)
    monkeypatch.setattr(window.time, "monotonic", lambda: now[0] + 1.0)
    made = window.summaries(window.LiveJob(7, "python train.py", [8]), "rank")
    for _ in range(3):
        next(made)
    assert set(pauses) == {window.SUMMARY_SECONDS}

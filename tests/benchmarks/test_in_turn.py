"""Cases are timed in turn, in the order that keeps them comparable."""

from __future__ import annotations

import pytest


def test_cases_take_turns_in_another_order_each_round_and_are_prepared_before_each_call(
    load,
):
    in_turn = load("in_turn")
    said = []
    cases = [
        in_turn.Timed(lambda n=n: said.append(n), lambda n=n: said.append(-n))
        for n in (1, 2, 3)
    ]
    seconds = in_turn.time_in_turn(None, cases, 2, warm_up=1, in_a_row=2, calls=2)
    assert seconds.shape == (2, 3, 2)
    assert (seconds > 0).all()
    turns = {n: [-n, n, n] * 2 for n in (1, 2, 3)}
    rounds = (1, 2, 3), (2, 3, 1), (3, 1, 2)
    assert said == [entry for order in rounds for n in order for entry in turns[n]]


@pytest.mark.world
@pytest.mark.sizes(2)
def test_the_slowest_rank_counts_and_a_case_alone_is_called_by_rank_0(world, load):
    in_turn = load("in_turn")
    calls = []
    cases = [
        in_turn.Timed(lambda: calls.append("all")),
        in_turn.Timed(lambda: calls.append("one"), rank_0_only=True),
    ]
    seconds = in_turn.time_in_turn(world, cases, 3)
    assert calls.count("all") == 3
    assert calls.count("one") == (3 if world.rank == 0 else 0)
    assert all((other == seconds).all() for other in world.allgather(seconds))


def test_who_has_nothing_to_call_takes_no_time(load):
    assert load("in_turn").time_call(None, None) == 0

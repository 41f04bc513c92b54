"""Monitors of many machines query one another along a tree, whoever of them is gone."""

from __future__ import annotations

import threading

import pytest

from chainermn_comm.watchdog import monitor_tree
from tests.support.monitors import FANOUT, monitors, neighbours

SIZE = 64
SECONDS = 30.0


def ask_all(made, kind, machines=range(SIZE), seconds=SECONDS):
    """What these machines' monitors find out, all at the same time."""
    found = {}

    def ask(number):
        found[number] = made.trees[number].query(kind, seconds)()

    threads = [threading.Thread(target=ask, args=(number,)) for number in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def others(made, number, gone=()):
    known = {*range(len(made.trees))} - {number, *gone}
    return sorted(rank for machine in known for rank in made.ranks_of(machine))


def check_that_1_alone_is_silent(made):
    answers = made.trees[0].query("calls", SECONDS)()
    assert answers.silent == ["ranks 2, 3 on host1"]
    assert sorted(rank.world for rank in answers.ranks) == others(made, 0, [1])


def test_each_monitor_queries_its_neighbours_alone_and_hears_of_all_ranks(monkeypatch):
    """However many ask, each link carries a query each way, and each machine looks once."""
    monkeypatch.setitem(monitor_tree.FRESH_SECONDS, "calls", 1000.0)
    with monitors(SIZE) as made:
        found = ask_all(made, "calls")
        for number, answers in found.items():
            assert sorted(rank.world for rank in answers.ranks) == others(made, number)
            assert answers.silent == []
        for number in range(SIZE):
            queried = {other for one, other in made.queries if one == number}
            assert queried == set(neighbours(number, SIZE))
            assert len(queried) <= FANOUT + 1
        assert set(made.queries.values()) == {1}
        assert made.queries.total() == 2 * (SIZE - 1)


def test_which_rank_failed_first_is_asked_anew_each_time():
    with monitors(SIZE) as made:
        made.failed = {}
        assert {*ask_all(made, "failed")[7].failed} == {0.0}
        made.failed = {40: 3.0}
        (age,) = {*ask_all(made, "failed", [7])[7].failed} - {0.0}
        assert age >= 3.0


@pytest.mark.parametrize("gone", [[0], [1], [0, 2], [1, 5], [63]])
def test_without_some_machines_all_others_hear_of_one_another(gone):
    """Their neighbours are queried in their place, also those of two that are neighbours."""
    with monitors(SIZE) as made:
        for number in gone:
            made.let_go(number)
        left = [number for number in range(SIZE) if number not in gone]
        for number, answers in ask_all(made, "stacks", left).items():
            assert sorted(rank.world for rank in answers.ranks) == others(made, number, gone)
            assert answers.silent == sorted(made.machines[one].name for one in gone)


def test_a_machine_that_was_silent_before_is_passed_over_without_waiting_for_it():
    """Those behind it are asked at the same time, once for all that ask."""
    with monitors(SIZE) as made:
        made.hang(1)
        made.heard(1, seconds_ago=10.0)
        for number, answers in ask_all(made, "calls", (0, 5, 40, 63), 2.0).items():
            assert answers.silent == ["ranks 2, 3 on host1"]
            assert sorted(rank.world for rank in answers.ranks) == others(made, number, [1])


@pytest.mark.parametrize("lost", [[1, 5], [0, 1, 5], [2, 5]])
def test_several_machines_that_were_silent_before_are_passed_over(lost):
    """Also one behind another, of which those that ask in its place get no heartbeats."""
    with monitors(SIZE) as made:
        for number in lost:
            made.hang(number)
        for number in lost:
            made.heard(number, seconds_ago=10.0)
        for number, answers in ask_all(made, "calls", (3, 21, 63), 4.0).items():
            assert answers.silent == sorted(made.machines[one].name for one in lost)
            assert sorted(rank.world for rank in answers.ranks) == others(made, number, lost)


def test_of_a_machine_that_falls_silent_meanwhile_all_behind_it_are_named():
    with monitors(SIZE) as made:
        made.hang(1)
        answers = made.trees[0].query("calls", 1.0)()
        behind = {1, *range(5, 9), *range(21, 37)}
        assert answers.silent == sorted(made.machines[one].name for one in behind)
        assert sorted(rank.world for rank in answers.ranks) == others(made, 0, behind)


def test_stacks_that_are_equal_travel_once_and_different_ones_up_to_a_limit(monkeypatch):
    with monitors(9, ranks=40) as made:
        reply = made.trees[0].reply(f"stacks 1 {SECONDS}")
        assert list(reply["texts"].values()) == [made.stacks]
        for rank in made.trees[5].query("stacks", SECONDS)().ranks:
            assert rank.stacks == made.stacks
    monkeypatch.setattr(monitor_tree, "MOST_STACKS_CHARACTERS", len(made.stacks) - 1)
    with monitors(2) as made:
        ranks = made.trees[0].query("stacks", SECONDS)().ranks
        assert [rank.stacks for rank in ranks] == ["", ""]


@pytest.mark.parametrize("said", [{}, {"ranks": [1]}, [], 5, {"ranks": None}])
def test_a_reply_that_can_not_be_read_is_none_and_keeps_nothing_from_those_behind(said):
    with monitors(9) as made:
        made.says[1] = said
        check_that_1_alone_is_silent(made)


@pytest.mark.parametrize("reply", [[], 5, {"machines": 5}, {"machines": {"1": {}}, "texts": 3}])
def test_one_that_replies_otherwise_is_passed_over(reply):
    with monitors(9) as made:
        made.replies[1] = reply
        check_that_1_alone_is_silent(made)


@pytest.mark.parametrize("query", ["", "calls", "calls x 1", "calls 1 x", "silent", "what 1 1"])
def test_what_is_no_query_gets_no_reply_and_does_no_harm(query):
    with monitors(3) as made:
        peer = made.trees[1].neighbours[0]
        with pytest.raises(OSError, match="host0 doesn't answer"):
            peer.query(query, SECONDS)
        assert made.trees[1].query("calls", SECONDS)().silent == []


def test_a_monitor_on_the_same_address_is_not_taken_for_another():
    with monitors(9) as made:
        made.mislead(0, 1, to=2)
        check_that_1_alone_is_silent(made)


def test_a_silent_machine_is_reported_once_on_each_side_of_a_cut():
    with monitors(SIZE) as made:
        made.hang(1)
        first, *others = (made.trees[one] for one in neighbours(1, SIZE))  # 0, and 5 to 8
        made.heard(1, seconds_ago=21.0)
        assert first.is_first_to_find_silent(1)
        assert [one.is_first_to_find_silent(1) for one in others] == [False] * 4
        made.let_go(0)  # or a cut parts it from the others
        assert [one.is_first_to_find_silent(1) for one in others] == [True] + [False] * 3
        # Where the others still hear it, the one link is cut.
        made.heard(1, seconds_ago=1.0)
        others[3].neighbours[1].last_heartbeat -= 20.0
        assert others[3].is_first_to_find_silent(1)

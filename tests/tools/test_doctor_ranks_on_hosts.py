"""How the doctor judges what ranks on hosts said: where they are, and what they exchanged."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.doctor import COMMUNICATORS, HERE

BEGAN = ({"began": "a"}, {"began": "b"})
BOTH = (*BEGAN, {"hosts": ["a", "b"]})
RATES = {"seconds": 0.004, "tcp_seconds": 0.003, "bytes": 4_000_000, "busy": False}
PAIR: dict[str, Any] = {"pair": ["a", "b"], "stalled": False, "right": True, **RATES}
NAMES = [name for name in COMMUNICATORS if name != "single_node"]
WELL: list[dict[str, Any]] = [
    {"communicator": name, "found": {"right": True, "wrong": [], "problem": None}}
    for name in NAMES
    if name != "pure_nccl"
]
WELL.append({"communicator": "pure_nccl", "found": {"why_not": "no GPU"}})


@pytest.fixture
def judge(machine):
    """Gives what a check makes of what ranks on the hosts a and b said, and more that are given."""

    def judged(check: str, *said: dict[str, Any], more: str = "", status=0, err="", **hosts: Any):
        machine.mpi()
        machine.hosts("a", "b", *more, **hosts)
        machine.ranks(said=said, status=status, err=err)
        return machine.look(check)

    return judged


@pytest.mark.parametrize(
    ("said", "ended", "verdict", "words"),
    [
        (BOTH, {}, "ok", "1 rank on a and 1 rank on b"),
        ((*BEGAN, {"hosts": ["a", "a"]}), {}, "failed", "2 ranks on a, and should be on"),
        (BEGAN, {"status": None}, "failed", "MPI hangs while it starts"),
        (BEGAN[:1], {"status": None}, "failed", "no rank began on b"),
        ((), {"status": None}, "failed", "no rank began on a and b"),
        (BEGAN, {"status": 9, "err": "oh\nno\n"}, "failed", "status 9: no"),
        (BOTH, {"status": None}, "ok", "1 rank on a"),
        (BEGAN[:1], {"status": 255}, "failed", "no rank began on b, and the job"),
    ],
)
def test_places_of_ranks(judge, said, ended, verdict, words):
    found = judge("placement", *said, **ended)
    assert (found.status, words in found.found) == (verdict, True), found


def test_every_two_hosts_are_tried_and_of_many_neighbours(judge, machine):
    judge("hosts' messages", *BOTH, PAIR, more="c")
    pairs, names = machine.exchange()
    assert [pair[:2] for pair in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert names == NAMES
    judge("hosts' messages", *BOTH, PAIR, more="cdefgh")
    around = list(zip("abcdefgh", "bcdefgha", strict=True))
    assert [pair[:2] for pair in machine.exchange()[0]] == around


def test_one_host_by_two_names_has_nobody_to_talk_to(judge):
    found = judge("hosts' messages", *BOTH, *WELL, b={"hostname": "a", "machine": "a"})
    assert found.status == "skipped"


def test_an_address_is_that_by_which_the_first_host_finds_the_second(judge, machine):
    connected = {
        name: {
            "variables": {"SSH_CONNECTION": f"10.0.0.9 1 10.0.0.{number} 22"},
            "reached": {HERE: {}},
        }
        for name, number in (("a", 1), ("b", 2))
    }
    judge("hosts' messages", *BOTH, PAIR, *WELL, **connected)
    assert machine.exchange()[0] == [("a", "b", "10.0.0.2")]


@pytest.mark.parametrize(
    ("said", "ended", "verdict", "words", "fix"),
    [
        (PAIR, {}, "ok", "at 954 MiB/s between a and b; at least 0.75 of", ""),
        ({**PAIR, "tcp_seconds": None}, {}, "ok", "between a and b", ""),
        ({**PAIR, "seconds": 1.0}, {}, "warning", "too slow between a and b", "env |"),
        ({**PAIR, "seconds": 1.0, "busy": True}, {}, "ok", "more to do", ""),
        ({"pair": ["a", "b"], "stalled": True}, {}, "failed", "large ones stall", "mtu"),
        ({**PAIR, "right": False}, {}, "failed", "wrong values", "report"),
        (
            {"trying": ["a", "b"]},
            {"status": None},
            "failed",
            "between a and b large messages don't come through MPI within",
            "UCX_NET_DEVICES",
        ),
        (
            {"trying": ["a", "b"]},
            {"status": 9, "err": "Killed\n"},
            "failed",
            "the job ended with status 9: Killed",
            "report",
        ),
    ],
)
def test_messages_between_hosts(judge, said, ended, verdict, words, fix):
    found = judge("hosts' messages", *BOTH, said, **ended)
    assert (found.status, words in found.found) == (verdict, True), found
    assert fix in (found.fix or "")


def of(name: str, **found: Any) -> dict[str, Any]:
    return {"communicator": name, "found": {"problem": None, "right": False, "wrong": [], **found}}


@pytest.mark.parametrize(
    ("said", "ended", "words", "fix"),
    [
        (
            [*WELL[:2], {"trying": "hierarchical"}],
            {"status": None},
            "the communicator 'hierarchical' doesn't come to its end within",
            "--timeout",
        ),
        (
            WELL[:1],
            {"status": 139, "err": "Segmentation fault\n"},
            "the communicator 'flat' doesn't come to its end, and the job ended with status 139",
            "report",
        ),
        (WELL, {"status": None}, "the ranks don't come to their end", "--timeout"),
        ([of("naive", problem="send: oh")], {}, "naive: send: oh", "report"),
        ([of("flat", wrong=["bcast"])], {}, "flat: wrong values of bcast", "another communicator"),
    ],
)
def test_communicators_over_hosts_that_fail_are_named(judge, said, ended, words, fix):
    found = judge("hosts' communicators", *BOTH, PAIR, *said, **ended)
    assert (found.status, words in found.found) == ("failed", True), found
    assert fix in found.fix


def test_communicators_over_hosts_that_are_right_are_listed(judge):
    found = judge("hosts' communicators", *BOTH, PAIR, *WELL)
    assert found.status == "ok"
    assert found.details["communicators"] == [name for name in NAMES if name != "pure_nccl"]

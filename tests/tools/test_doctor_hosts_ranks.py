"""How the doctor judges what ranks on hosts said: where they are, and what they exchanged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chainermn_tools import program
from chainermn_tools.doctor.hosts import ranks, remote
from chainermn_tools.doctor.hosts.exchanges import communicators, messages
from chainermn_tools.doctor.hosts.places import placement
from chainermn_tools.doctor.hosts.round import HERE
from chainermn_tools.doctor.live import steps

from .test_doctor_hosts import look, reply

BEGAN = ({"began": "a"}, {"began": "b"})
BOTH = (*BEGAN, {"hosts": ["a", "b"]})
RATES = {"seconds": 0.004, "tcp_seconds": 0.003, "bytes": 4_000_000, "busy": False}
PAIR: dict[str, Any] = {"pair": ["a", "b"], "stalled": False, "right": True, **RATES}
NAMES = [name for name in steps.COMMUNICATORS if name != "single_node"]
WELL: list[dict[str, Any]] = [
    {"communicator": name, "found": {"right": True, "wrong": [], "problem": None}}
    for name in NAMES
    if name != "pure_nccl"
]
WELL.append({"communicator": "pure_nccl", "found": {"why_not": "no GPU"}})


def ended(*records: dict[str, Any], status: int | None = 0, err: str = "") -> program.Ended:
    lines = [f"junk\n{remote.MARK}{json.dumps(record)}\n" for record in records]
    return program.Ended(status, "\n".join(lines), err)


@pytest.fixture
def judge(monkeypatch):
    """Gives what a check makes of a job on the hosts a and b, and others that are given."""

    def judged(check, job: program.Ended, *more: str):
        started: list[dict[str, Any]] = []

        def start(context, shares, seconds, pairs=(), names=()):
            started.append({"shares": shares, "pairs": pairs, "names": names})
            return job

        monkeypatch.setattr(ranks, "start", start)
        answer = look(check, "a", "b", *more)
        return answer, started

    return judged


@pytest.mark.parametrize(
    ("job", "status", "words"),
    [
        (ended(*BOTH), "ok", "1 rank on a and 1 rank on b"),
        (ended(*BEGAN, {"hosts": ["a", "a"]}), "failed", "2 ranks on a, and should be on"),
        (ended(*BEGAN, status=None), "failed", "MPI hangs while it starts"),
        (ended(BEGAN[0], status=None), "failed", "no rank began on b"),
        (ended(status=None), "failed", "no rank began on a and b"),
        (ended(*BEGAN, status=9, err="oh\nno\n"), "failed", "status 9: no"),
        (ended(*BOTH, status=None), "ok", "1 rank on a"),
        (ended(BEGAN[0], status=255), "failed", "no rank began on b, and the job"),
    ],
)
def test_places_of_ranks(judge, job, status, words):
    answer, _ = judge(placement, job)
    assert answer.status == status
    assert words in answer.found


def test_every_two_hosts_are_tried_and_of_many_neighbours(judge):
    _, (started,) = judge(messages, ended(*BOTH, PAIR), "c")
    assert [pair[:2] for pair in started["pairs"]] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert started["names"] == tuple(NAMES)
    _, (started,) = judge(messages, ended(*BOTH, PAIR), *"cdefgh")
    assert [pair[:2] for pair in started["pairs"]] == [
        tuple(two) for two in zip("abcdefgh", "bcdefgha", strict=True)
    ]


def test_one_host_by_two_names_has_nobody_to_talk_to(monkeypatch):
    monkeypatch.setattr(ranks, "start", lambda *_: ended(*BOTH, *WELL))
    twice = {"a": reply("a"), "also-a": reply("a")}
    assert look(messages, **twice).status == "skipped"


@pytest.mark.parametrize(
    ("job", "status", "words", "fix"),
    [
        (ended(*BOTH, PAIR), "ok", "at 954 MiB/s between a and b; at least 0.75 of", ""),
        (ended(*BOTH, {**PAIR, "tcp_seconds": None}), "ok", "between a and b", ""),
        (ended(*BOTH, {**PAIR, "seconds": 1.0}), "warning", "too slow between a and b", "env |"),
        (ended(*BOTH, {**PAIR, "seconds": 1.0, "busy": True}), "ok", "more to do", ""),
        (ended(*BOTH, {"pair": ["a", "b"], "stalled": True}), "failed", "large ones stall", "mtu"),
        (ended(*BOTH, {**PAIR, "right": False}), "failed", "wrong values", "report"),
        (
            ended(*BOTH, {"trying": ["a", "b"]}, status=None),
            "failed",
            "between a and b large messages don't come through MPI within",
            "UCX_NET_DEVICES",
        ),
        (
            ended(*BOTH, {"trying": ["a", "b"]}, status=9, err="Killed\n"),
            "failed",
            "the job ended with status 9: Killed",
            "report",
        ),
    ],
)
def test_messages_between_hosts(judge, job, status, words, fix):
    answer, _ = judge(messages, job)
    assert (answer.status, words in answer.found) == (status, True), answer
    assert fix in (answer.fix or "")


@pytest.mark.parametrize(
    ("job", "words", "fix"),
    [
        (
            ended(*BOTH, PAIR, *WELL[:2], {"trying": "hierarchical"}, status=None),
            "the communicator 'hierarchical' doesn't come to its end within",
            "--timeout",
        ),
        (
            ended(*BOTH, PAIR, *WELL[:1], status=139, err="Segmentation fault\n"),
            "the communicator 'flat' doesn't come to its end, and the job ended with status 139",
            "report",
        ),
        (ended(*BOTH, PAIR, *WELL, status=None), "the ranks don't come to their end", "--timeout"),
        (
            ended(*BOTH, PAIR, {"communicator": "naive", "found": {"problem": "send: oh"}}),
            "naive: send: oh",
            "report",
        ),
        (
            ended(
                *BOTH,
                PAIR,
                {
                    "communicator": "flat",
                    "found": {"problem": None, "right": False, "wrong": ["bcast"]},
                },
            ),
            "flat: wrong values of bcast",
            "another communicator",
        ),
    ],
)
def test_communicators_over_hosts_that_fail_are_named(judge, job, words, fix):
    answer, _ = judge(communicators, job)
    assert (answer.status, words in answer.found) == ("failed", True), answer
    assert fix in answer.fix


def test_communicators_over_hosts_that_are_right_are_listed(judge):
    answer, _ = judge(communicators, ended(*BOTH, PAIR, *WELL))
    assert (answer.status, answer.details["communicators"]) == ("ok", NAMES[:5] + NAMES[6:])


def test_an_address_is_that_by_which_the_first_host_finds_the_second(monkeypatch):
    jobs = []

    def start(*arguments):
        jobs.append(arguments)
        return ended(*BOTH, PAIR, *WELL)

    monkeypatch.setattr(ranks, "start", start)
    a, b = (
        reply(name, {HERE: {}}, variables={"SSH_CONNECTION": f"10.0.0.9 1 10.0.0.{number} 22"})
        for name, number in (("a", 1), ("b", 2))
    )
    look(messages, a=a, b=b)
    assert jobs[0][3] == (("a", "b", "10.0.0.2"),)

"""How the doctor judges what ranks on hosts said: where they are, and what they exchanged."""

from __future__ import annotations

from typing import Any

from tests.support.tools.doctor import COMMUNICATORS, each_row

BEGAN = ({"began": "a"}, {"began": "b"})
BOTH = (*BEGAN, {"hosts": ["a", "b"]})
PAIR: dict[str, Any] = {
    "pair": ["a", "b"],
    "correct": True,
    "seconds": 0.004,
    "bytes": 4_000_000,
}
NAMES = [name for name in COMMUNICATORS if name != "single_node"]


def of(name: str, **found: Any) -> dict[str, Any]:
    return {
        "communicator": name,
        "found": {"problem": None, "correct": True, "wrong": [], **found},
    }


WELL = [of(name) for name in NAMES if name != "pure_nccl"]
WELL.append({"communicator": "pure_nccl", "found": {"reason": "no GPU"}})


def job(*said: dict[str, Any], status: int | None = 0, err: str = "", **replies: Any):
    """Ranks on the hosts a and b, and more that are given: what they said, and how they ended."""
    hosts = {"a": {}, "b": {}, **replies}
    return {"replies": hosts, "job": {"said": said, "status": status, "err": err}}


def exchanged(*said: dict[str, Any], **ended: Any):
    return job(*BOTH, *said, **ended)


TABLE = {
    "placement": [
        ("ok", "1 rank on a and 1 rank on b", "", job(*BOTH)),
        (
            "failed",
            "2 ranks on a, and should be on",
            "",
            job(*BEGAN, {"hosts": ["a", "a"]}),
        ),
        ("failed", "MPI hangs while it starts", "", job(*BEGAN, status=None)),
        ("failed", "no rank began on b", "", job(BEGAN[0], status=None)),
        ("failed", "no rank began on a and b", "", job(status=None)),
        ("failed", "status 9: no", "", job(*BEGAN, status=9, err="oh\nno\n")),
        ("ok", "1 rank on a", "", job(*BOTH, status=None)),
        ("failed", "no rank began on b, and the job", "", job(BEGAN[0], status=255)),
    ],
    "hosts_messages": [
        ("ok", "at 954 MiB/s from a to b", "", exchanged(PAIR)),
        ("failed", "wrong values", "report", exchanged({**PAIR, "correct": False})),
        (
            *("failed", "between a and b large messages don't come through MPI within"),
            *("UCX_NET_DEVICES", exchanged(status=None)),
        ),
        (
            *("failed", "the job ended with status 9: Killed", "report"),
            exchanged(status=9, err="Killed\n"),
        ),
        # One host by two names has nobody to talk to.
        ("skipped", "", "", exchanged(*WELL, b={"hostname": "a", "machine": "a"})),
    ],
    "hosts_communicators": [
        (
            *(
                "failed",
                "the communicator 'hierarchical' doesn't come to its end within",
            ),
            *("--timeout", exchanged(PAIR, *WELL[:2], status=None)),
        ),
        (
            *(
                "failed",
                "communicator 'flat' doesn't come to its end, and the job ended with ",
            ),
            *(
                "report",
                exchanged(PAIR, WELL[0], status=139, err="Segmentation fault\n"),
            ),
        ),
        (
            *("failed", "the ranks don't come to their end", "--timeout"),
            exchanged(PAIR, *WELL, status=None),
        ),
        (
            *("failed", "naive: send: oh", "report"),
            exchanged(PAIR, of("naive", correct=False, problem="send: oh")),
        ),
        (
            *("failed", "flat: wrong values of bcast", "another communicator"),
            exchanged(PAIR, of("flat", correct=False, wrong=["bcast"])),
        ),
    ],
}


@each_row(TABLE)
def test_what_ranks_on_hosts_said_is_judged(says, check, status, said, fix, given):
    says(check, status, said, fix, **given)


def test_communicators_over_hosts_that_are_right_are_listed(says):
    found = says("hosts_communicators", "ok", **exchanged(PAIR, *WELL))
    assert found.details["communicators"] == [
        name for name in NAMES if name != "pure_nccl"
    ]


def test_every_two_hosts_are_tried_and_of_many_neighbours(machine, says):
    says("hosts_messages", "failed", **exchanged(PAIR, c={}))
    pairs, names = machine.exchange()
    assert pairs == [("a", "b"), ("a", "c"), ("b", "c")]
    assert names == NAMES
    says("hosts_messages", "failed", **exchanged(PAIR, **{key: {} for key in "cdefgh"}))
    around = list(zip("abcdefgh", "bcdefgha", strict=True))
    assert machine.exchange()[0] == around

"""Each fault once, each moment at least once; a third of it by default.

`make chaos` has all of them at all moments, and the figures: how long each took.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hosts.virtual_hosts import Cluster, missing

from .faults import AT_RANDOM, KINDS, MOMENTS, POINTS, ROUND, Case, draw
from .monitors import disturbed
from .runs import Hosts
from .trials import Trials

CASES = [
    Case("exception", "scatter_dataset", communicator="hierarchical"),
    Case("sys.exit", "bcast_data", victim=0, launcher="launch"),
    Case("os._exit", "first update", communicator="naive"),
    Case(
        "SIGTERM", "collective", 4, 0, communicator="two_dimensional", launcher="launch"
    ),
    Case("SIGKILL", "writing", 6, communicator="hierarchical"),
    Case("SIGSEGV", "user code", 5),
    Case("memory", "checkpoint", 6, 0, communicator="naive", launcher="launch"),
    Case("SIGSTOP", "finalize"),
    Case("loop", "user code", 2, communicator="hierarchical"),
    Case("held", "collective", 4, 0, communicator="naive", launcher="launch"),
    Case("skip", "checkpoint", 3, ranks=3),
    Case("other", "first update", communicator="hierarchical"),
    Case("shape", "bcast_data", victim=0, communicator="two_dimensional"),
    Case("disk", "writing", 6),
]
# A death whose job goes on from its checkpoint, one in which nothing can be allocated,
# a rank that leaves a call out, and a full disk.
DEFAULT = ("SIGKILL", "memory", "skip", "disk")
# Whose end is compared with that of an unbroken job.
RESTARTED = ("SIGKILL",)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if lacking := missing():
        pytest.skip(f"no hosts can be made here: {lacking}")
    with Cluster(("alpha", "beta")) as made:
        yield Hosts(made)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.kind}-{case.moment}",
            marks=() if case.kind in DEFAULT else pytest.mark.full,
        )
        for case in CASES
    ],
)
def test_a_failure_ends_the_job_and_is_named_and_leaves_nothing(case, request):
    trials = Trials(request.getfixturevalue("hosts") if case.kind == "disk" else None)
    trial = trials.run(case, restart=case.kind in RESTARTED)
    assert trial.happened, f"{trial!r}"
    assert not trial.wrongs, f"{trial!r}"


@pytest.mark.full
def test_a_job_whose_ranks_get_on_is_not_ended_whatever_becomes_of_its_monitors(
    hosts, tmp_path
):
    wrong, disturbance = disturbed(hosts.cluster, tmp_path, 0)
    assert not wrong, wrong
    assert {"cut", "kill", "slow", "break"} <= set(disturbance.done)


def test_the_short_part_has_each_fault_and_each_moment():
    # The cut link is in tests/test_promises_of_time.py.
    assert {case.kind for case in CASES} == set(KINDS) - {"link"}
    assert {case.moment for case in CASES} == set(MOMENTS)


def test_the_long_part_has_each_fault_at_each_moment_and_at_random_times():
    drawn = [draw(seed) for seed in range(ROUND)]
    assert {(case.kind, case.moment) for case in drawn if case.moment} == set(POINTS)
    at_random = [case.kind for case in drawn if case.moment is None]
    assert len(at_random) > ROUND / 3
    assert set(at_random) >= {*AT_RANDOM} - {"link"}
    assert {case.ranks for case in drawn} == {2, 3, 4}
    assert {case.hosts for case in drawn} == {1, 2}
    assert draw(7) == draw(7)
    without = [draw(seed, hosts=False) for seed in range(ROUND)]
    assert {case.hosts for case in without} == {1}

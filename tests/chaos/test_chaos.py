"""Each fault once, each moment at least once; a third of it by default.

`make chaos` has all of them at all moments, and the figures: how long each took.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.virtual_hosts import Cluster, missing

from .cases import DEATHS, KINDS, MOMENTS, POINTS, ROUND, STALLS, Case, draw
from .grounds import Hosts
from .trials import Trials

# Kind, moment, iteration, victim, ranks, communicator, launcher, hosts.
CASES = [
    ("exception", "scatter_dataset", 0, 1, 2, "hierarchical", "mpiexec", 1),
    ("sys.exit", "bcast_data", 0, 0, 2, "flat", "launch", 1),
    ("os._exit", "first update", 0, 1, 2, "naive", "mpiexec", 1),
    ("SIGTERM", "collective", 4, 0, 2, "two_dimensional", "launch", 1),
    ("SIGKILL", "writing", 6, 1, 2, "hierarchical", "mpiexec", 1),
    ("SIGSEGV", "user code", 5, 1, 2, "flat", "mpiexec", 1),
    ("memory", "checkpoint", 6, 0, 2, "naive", "launch", 1),
    ("SIGSTOP", "finalize", 0, 1, 2, "flat", "mpiexec", 1),
    ("loop", "user code", 2, 1, 2, "hierarchical", "mpiexec", 1),
    ("held", "collective", 4, 0, 2, "naive", "launch", 1),
    ("skip", "checkpoint", 3, 1, 3, "flat", "mpiexec", 1),
    ("other", "first update", 0, 1, 2, "hierarchical", "mpiexec", 1),
    ("shape", "bcast_data", 0, 0, 2, "two_dimensional", "mpiexec", 1),
]
ON_HOSTS = [
    ("disk", "writing", 6, 1, 2, "flat", "mpiexec", 1),
    ("link", "collective", 4, 1, 2, "hierarchical", "launch", 2),
]
# A death whose job goes on from its checkpoint, one in which nothing can be allocated, a rank that
# holds Python's lock, one that leaves a call out, and a full disk.
DEFAULT = ("SIGKILL", "memory", "held", "skip", "disk")
# Whose end is compared with that of an unbroken job.
RESTARTED = ("SIGKILL",)


def in_tiers(cases):
    return [
        pytest.param(
            words,
            id=f"{words[0]}-{words[1]}",
            marks=() if words[0] in DEFAULT else pytest.mark.full,
        )
        for words in cases
    ]


def case_of(kind, moment, iteration, victim, ranks, communicator, launcher, hosts):
    settings = ranks, communicator, launcher, hosts, False
    return Case(-1, kind, moment, iteration, 0.0, victim, *settings)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    lacking = missing()
    if lacking:
        pytest.skip(f"no hosts can be made here: {lacking}")
    with Cluster(("alpha", "beta")) as made:
        yield Hosts(made)


@pytest.mark.parametrize("words", in_tiers(CASES))
def test_a_failure_ends_the_job_and_is_named_and_leaves_nothing(words):
    check(Trials(), case_of(*words))


@pytest.mark.parametrize("words", in_tiers(ON_HOSTS))
def test_a_full_disk_and_a_cut_link_do_so_too(words, hosts):
    check(Trials(hosts), case_of(*words))


def check(trials: Trials, case: Case) -> None:
    trial = trials.run(case, restart=case.kind in RESTARTED)
    assert trial.happened, f"{trial!r}"
    assert trial.is_right, f"{trial!r}"


def test_the_short_part_has_each_fault_and_each_moment():
    drawn = [case_of(*words) for words in (*CASES, *ON_HOSTS)]
    assert {case.kind for case in drawn} == set(KINDS)
    assert {case.moment for case in drawn} == set(MOMENTS)


def test_the_long_part_has_each_fault_at_each_moment_and_at_random_times():
    drawn = [draw(seed) for seed in range(ROUND)]
    assert {(case.kind, case.moment) for case in drawn if case.moment} == set(POINTS)
    at_random = [case.kind for case in drawn if case.moment is None]
    assert len(at_random) > ROUND / 3
    assert set(at_random) >= {*DEATHS, *STALLS}
    assert {case.ranks for case in drawn} == {2, 3, 4}
    assert {case.hosts for case in drawn} == {1, 2}
    assert draw(7) == draw(7)
    without = [draw(seed, hosts=False) for seed in range(ROUND)]
    assert {case.hosts for case in without} == {1}

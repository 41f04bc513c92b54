"""Each fault once, each moment at least once; a third of it by default.

`make chaos` draws faults, moments and jobs, and has the figures: how long each took.
"""

from __future__ import annotations

import os

import pytest

from tests.support.hosts.virtual_hosts import Cluster, missing

from .faults import EACH, KINDS, MOMENTS, draw
from .monitors import disturbed
from .runs import HOSTS
from .trials import BESIDE, Trials, figures

# A death whose job goes on from its checkpoint, one in which nothing can be allocated,
# a rank that leaves a call out, and a full disk.
DEFAULT = ("SIGKILL", "memory", "skip", "disk")


# How many are drawn, and the seed of the first.
RUNS = int(os.environ.get("CHAOS_RUNS", "20"))
SEED = int(os.environ.get("CHAOS_SEED", "0"))


@pytest.fixture(scope="module")
def cluster():
    if lacking := missing():
        pytest.skip(f"no hosts can be made here: {lacking}")
    with Cluster(HOSTS) as made:
        yield made


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=f"{case.kind}-{case.moment}",
            marks=() if case.kind in DEFAULT else pytest.mark.full,
        )
        for case in EACH
        if case.kind != "link"  # it is in tests/test_promises_of_time.py
    ],
)
def test_a_failure_ends_the_job_and_is_named_and_leaves_nothing(case, cluster):
    # The end is compared with that of an unbroken job once.
    trial = Trials(cluster).run(case, restart=case.kind == "SIGKILL")
    assert trial.happened, f"{trial}"
    assert not trial.wrongs, f"{trial}"


@pytest.mark.full
def test_a_job_whose_ranks_get_on_is_not_ended_whatever_becomes_of_its_monitors(
    cluster, tmp_path
):
    wrong, done = disturbed(cluster, tmp_path, 2)
    assert not wrong, wrong
    assert {*done} == {"stop", "kill", "cut", "break"}


@pytest.mark.full
@pytest.mark.alone
def test_drawn_failures_end_their_jobs_in_time_and_are_named(cluster, tmp_path_factory):
    """CHAOS_RUNS=1 and a seed as CHAOS_SEED repeat one that went wrong."""
    trials = Trials(cluster)
    found = []
    for seed in range(SEED, SEED + RUNS):
        trial = trials.run(draw(seed))
        print(f"seed {seed}: {trial.case}, {trial.seconds}", flush=True)
        if seed % 2 == 0:
            folder = tmp_path_factory.mktemp("monitors")
            wrong, done = disturbed(cluster, folder, seed)
            print(f"monitors: {', '.join(done)}", flush=True)
            if wrong:
                trial.wrongs[BESIDE] = wrong
        if trial.wrongs:
            print(trial, flush=True)
        found.append(trial)
    rows = figures(found)
    print(*rows, sep="\n", flush=True)
    for row in rows:
        assert row.holds, rows


def test_each_fault_is_tried_at_some_moment_and_each_moment_has_one():
    assert {case.kind for case in EACH} == {*KINDS}
    assert {case.moment for case in EACH} == {*MOMENTS}
    assert draw(7) == draw(7)

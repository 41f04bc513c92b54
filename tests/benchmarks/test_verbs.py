"""The benchmark of users' calls runs, and each verb gives what MPI's own call does."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from chainermn_comm import create_communicator
from tests.support.jobs.commands import run
from tests.support.jobs.scripts import ROOT

SCRIPT = ROOT / "benchmarks" / "verbs.py"


def test_a_short_run_compares_all_verbs(tmp_path: Path) -> None:
    file = tmp_path / "new" / "ratios.json"
    short = ("--megabytes", 0.1, "--repeat", 1, "--ranks", 2)
    done = run(sys.executable, SCRIPT, *short, "--json", file, seconds=300)
    found = json.loads(file.read_text())
    assert found["ranks"] == 2
    assert found["ratios"].keys() == {
        "allreduce",
        "bcast",
        "allgather",
        "reduce_scatter",
    }
    most = {"allreduce": 0.7}
    holds = all(ratio <= most.get(verb, 1.0) for verb, ratio in found["ratios"].items())
    assert done.returncode == (0 if holds else 1), done.stdout + done.stderr
    for verb, ratio in found["ratios"].items():
        row = next(
            line
            for line in done.stdout.splitlines()
            if line.lstrip().startswith(f"{verb} ")
        )
        assert f" {ratio:.2f} " in row


@pytest.mark.world
def test_cases_of_a_verb_have_the_same_result(world, load) -> None:
    verbs = load("verbs")
    with create_communicator("hierarchical", world) as comm:
        calls = verbs.make_calls(world, comm, 1e4)
        for verb in verbs.MOST:
            raw, ours = (
                np.ravel(calls[verb, whose]()) for whose in (verbs.RAW, verbs.OURS)
            )
            np.testing.assert_array_equal(ours, raw)

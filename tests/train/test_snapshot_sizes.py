"""Snapshots of a job of two ranks load in one of eight, and the other way round."""

from __future__ import annotations

import pytest

from tests.support.jobs import runner
from tests.support.jobs.scripts import ROOT


@pytest.mark.full
def test_eight_ranks_go_on_from_two_and_one_from_eight():
    name = "tests/train/test_snapshot.py::test_fewer_and_more_ranks_go_on"
    words = ("-m", "pytest", "--world", "--full", "-p", "no:cacheprovider", name)
    environment = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "0"}
    job = runner.run(8, *words, cwd=ROOT, environment=environment, seconds=600)
    assert job.returncode == 0, job
    assert "1 passed" in job.out, job

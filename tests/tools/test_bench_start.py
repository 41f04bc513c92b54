"""The job that `chainermn bench` starts, and how it may fail."""

from __future__ import annotations

import os

import pytest

from chainermn_tools.bench import start
from tests.support.commands import BIN


@pytest.fixture
def job_of(tmp_path, monkeypatch):
    """Have the ranks run another script."""
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setattr(start, "START_SECONDS", 0.0)

    def measure(script: str, limit: float) -> dict[str, object]:
        (tmp_path / "script.py").write_text(script)
        monkeypatch.setattr(start.rank, "__file__", str(tmp_path / "script.py"))
        return start.measure_on(2, ["flat"], [1024], 1.0, limit)

    return measure


def test_a_job_that_hangs_is_ended(job_of):
    with pytest.raises(start.Failed, match="did not end within 2 s") as told:
        job_of("import time; time.sleep(10_000)", 2.0)
    assert told.value.status == 124


@pytest.mark.full
def test_a_rank_that_fails_is_named(job_of):
    with pytest.raises(start.Failed, match="ValueError: no luck") as told:
        job_of("raise ValueError('no luck')", 100.0)
    assert told.value.status == 1


def test_a_result_that_does_not_arrive_is_said(job_of):
    with pytest.raises(start.Failed, match="result of rank 0 did not arrive") as told:
        job_of("", 100.0)
    assert told.value.status == 1


def test_a_missing_mpiexec_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(start.Failed, match="mpiexec") as told:
        start.measure_on(2, ["flat"], [1024], 1.0, 5.0)
    assert told.value.status == 2

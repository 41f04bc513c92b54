"""The job that `chainermn bench` starts, and how it may fail."""

import os
from typing import Any

import pytest

from chainermn_tools.bench import worker
from tests.support.jobs.commands import BIN


@pytest.fixture
def job_of(tmp_path, monkeypatch):
    """Have the ranks run another script."""
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setattr(worker, "START_SECONDS", 0.0)

    def measure(script: str, limit: float) -> tuple[Any, dict[str, Any]]:
        (tmp_path / "script.py").write_text(script)
        monkeypatch.setattr(worker, "__file__", str(tmp_path / "script.py"))
        return worker.measure_on(2, ["flat"], [1024], 1.0, limit)

    return measure


@pytest.mark.parametrize(
    ("script", "seconds", "words", "status"),
    [
        ("import time; time.sleep(10_000)", 2.0, "did not end within 2 s", 124),
        ("", 100.0, "result of rank 0 did not arrive", 1),
        pytest.param(
            "raise ValueError('no luck')",
            100.0,
            "ValueError: no luck",
            1,
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_went_wrong_with_a_job_is_said(job_of, script, seconds, words, status):
    result, report = job_of(script, seconds)
    assert words in result.message
    assert (result.success, result.status, report) == (False, status, {})


def test_a_missing_mpiexec_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    result, _ = worker.measure_on(2, ["flat"], [1024], 1.0, 5.0)
    assert "mpiexec" in result.message
    assert (result.success, result.status) == (False, 2)

"""`chainermn bench` with real jobs: started plainly, inside mpiexec, and ones that fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chainermn_tools.bench import rank, start

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]
# Ends a test that hangs.
LIMIT_SECONDS = 200
QUICK = (
    "bench",
    "--communicator",
    "flat",
    "--max-size",
    "1K",
)


def run(*words: object) -> subprocess.CompletedProcess[str]:
    known = {name: text for name, text in os.environ.items() if not name.startswith("CHAINERMN_")}
    return subprocess.run(
        [*map(str, words)],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        stdin=subprocess.DEVNULL,
        env={**known, "PATH": f"{BIN}:{known['PATH']}"},
    )


def keys_of(value: object) -> set[str]:
    if isinstance(value, list):
        return {key for one in value for key in keys_of(one)}
    if isinstance(value, dict):
        return value.keys() | {key for one in value.values() for key in keys_of(one)}
    return set()


def test_started_plainly_it_starts_ranks_and_tells_of_them(tmp_path):
    picture = tmp_path / "a picture.png"
    module = (sys.executable, "-m", "chainermn_tools")
    done = run(*module, *QUICK, "--seconds", 20, "-n", 2, "--json", "--plot", picture)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["right"] is True
    assert report["ranks"] == 2
    assert {row["size"] for row in report["results"]} == {1024}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "mpiexec -n 2" in done.stderr
    documented = (ROOT / "docs/bench.md").read_text()
    ours = keys_of(report) - keys_of(report["packages"]) | {"problem"}
    assert {key for key in ours if f"`{key}`" not in documented} == set()


def test_inside_mpiexec_it_measures_these_ranks():
    module = (BIN / "mpiexec", "-n", 3, sys.executable, "-m", "chainermn_tools")
    done = run(*module, *QUICK, "--seconds", 20)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 ranks on 1 node") == 1
    assert done.stdout.count("Mean of gradients") == 1
    assert done.stdout.rstrip().endswith("were right.")


@pytest.fixture
def job_of(tmp_path, monkeypatch):
    """Have the ranks run another script."""
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    monkeypatch.setattr(start, "START_SECONDS", 0.0)

    def measure(script: str, limit: float) -> dict[str, object]:
        (tmp_path / "script.py").write_text(script)
        monkeypatch.setattr(rank, "__file__", str(tmp_path / "script.py"))
        return start.measure_on(2, ["flat"], [1024], 1.0, limit)

    return measure


def test_a_job_that_hangs_is_ended(job_of):
    with pytest.raises(start.Failed, match="did not end within 2 s") as told:
        job_of("import time; time.sleep(1000)", 2.0)
    assert told.value.status == 124


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

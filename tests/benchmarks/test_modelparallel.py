"""The benchmark of model parallelism runs, and what it times is right."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.jobs.commands import run
from tests.support.jobs.scripts import ROOT

SCRIPT = ROOT / "benchmarks" / "modelparallel.py"


@pytest.mark.full  # half a minute
def test_each_comparison_is_made_and_right(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.json"
    done = run(
        sys.executable,
        SCRIPT,
        "--repeat",
        1,
        "--timeout",
        800,
        "--json",
        file,
        seconds=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())
    titles = [result["title"] for result in results]
    assert sum("there and back" in title for title in titles) == 4
    assert sum("batch normalization" in title for title in titles) == 3
    for result in results:
        assert result["right"]
        after = done.stdout.split(result["title"])[1]
        for name, ms in result["ms"].items():
            assert f"  {name} " in after
            assert f" {ms:.3f} " in after
        said = after.split("limit: ")[1]
        assert said.startswith(
            f"{result['limit']}: {'ok' if result['ok'] else 'not ok'} "
        )
        assert min(result["ms"].values()) > 0

"""The benchmark of model parallelism runs, and what it times is right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "modelparallel.py"


def test_each_comparison_is_made_and_right(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.json"
    command = [sys.executable, SCRIPT, "--repeat", "1", "--timeout", "800", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())
    titles = [result["title"] for result in results]
    assert sum("there and back" in title for title in titles) == 4
    assert sum("batch normalization" in title for title in titles) == 3
    for result in results:
        assert result["right"]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(result["title"])]
        assert f"limit: {result['limit']}: {'ok' if result['ok'] else 'not ok'}" in line
        assert min(result["ms"].values()) > 0

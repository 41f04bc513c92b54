"""The file that a user with GPUs attaches to a report."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.jobs.scripts import ROOT

SCRIPT = ROOT / "tests" / "gpu" / "report.sh"
# Stands for python and mpiexec.
PROGRAM = """#!/bin/sh
echo "$0 $*"
case "$*" in *doctor*) exit 3;; *"-n 4"*benchmarks*) exit $STATUS;; esac
"""


@pytest.mark.ci
@pytest.mark.parametrize("status", [0, 1])
def test_it_holds_what_each_command_printed_and_how_it_ended(tmp_path, status):
    for name in ("python", "mpiexec"):
        (tmp_path / name).write_text(PROGRAM)
        (tmp_path / name).chmod(0o755)
    report = tmp_path / "result" / "report.txt"
    command = [SCRIPT, "4", tmp_path, report]
    env = {"PATH": "/usr/bin:/bin", "STATUS": str(status)}
    assert subprocess.run(command, env=env, timeout=60).returncode == status
    lines = [
        line.replace(f"{tmp_path}/", "") for line in report.read_text().split("\n")
    ]
    ran = [line for line in lines if line.startswith(("python", "mpiexec"))]
    ended = [line for line in lines if line.startswith("status")]
    assert [line.split(": ", 1)[1] for line in ended] == ran
    statuses = [line.split(": ")[0] for line in ended]
    assert statuses == ["status 0", "status 3", *["status 0"] * 4, f"status {status}"]
    worlds = [line.split(" python")[0] for line in ran if "-m gpu" in line]
    assert worlds == ["mpiexec -n 1", "mpiexec -n 2", "mpiexec -n 4"]

"""Each benchmark runs: it times all its cases, and their results are right."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.support.hosts.virtual_hosts import missing
from tests.support.jobs import commands
from tests.support.jobs.scripts import ROOT

DIGITS = "digits MLP 64-100-100-10"
OURS = ["naive", "flat", "hierarchical", "two_dimensional", "reproducible=True"]
# The words after the program's name, and what is timed; PyTorch's cases may lack.
RUNS = {
    "allreduce": (
        ["--ranks", "2", "--models", DIGITS],
        [
            "memcpy, one rank",
            "memcpy, all ranks",
            "handoff",
            "MPI_Allreduce",
            "bundled naive",
            *OURS,
            "single_node",
            "non_cuda_aware",
            "dummy",
            "handshake alone",
        ],
    ),
    "verbs": (
        ["--ranks", "2", "--megabytes", "0.1"],
        [
            f"{verb}, {whose}"
            for verb in ("allreduce", "bcast", "allgather", "reduce_scatter")
            for whose in ("MPI's own", "ours")
        ],
    ),
    "verbs --functions": (
        [],
        ["raw MPI", "in Chainer's functions", "send and recv"],
    ),
    "step": (
        ["--models", "digits"],
        [
            "no exchange",
            "no exchange, in blocks",
            "barrier",
            "raw packing",
            "bundled naive",
            "dummy",
            "synchronous",
            "traced",
            "drift ignored",
            "double buffering",
            "overlapped",
            "sharded",
            "PowerSGD",
            "float16",
        ],
    ),
    "hosts": (
        ["--model", DIGITS],
        [
            "two ranks swap the bytes",
            "MPI_Allreduce",
            "bundled naive",
            *OURS,
            "hierarchical, float16",
            "two_dimensional, float16",
        ],
    ),
    "checkpoint": (
        ["--megabytes", "4"],
        ["Chainer's save_npz", "one rank", "all ranks", "in the background: held"],
    ),
    "scatter": (
        ["--ranks", "2", "--megabytes", "4"],
        [
            "one copy into fresh memory",
            "scatter_dataset",
            "scatter_dataset, shuffled",
            "bundled",
            "bundled, shuffled",
        ],
    ),
}


@pytest.mark.parametrize("program", RUNS)
def test_it_times_all_its_cases_and_all_are_right(program, tmp_path, monkeypatch):
    if program == "hosts" and missing():
        pytest.skip(missing())
    name, *options = program.split()
    words, cases = RUNS[program]
    options += ["--rounds", "2", "--json", str(tmp_path / "new" / "found.json")]
    if name == "step":
        options += ["--plot", str(tmp_path / "plot.png")]
    script = ROOT / "benchmarks" / f"{name}.py"
    done = commands.run(
        sys.executable, script, *words, *options, cwd=tmp_path, seconds=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    for case in cases:
        row = re.search(rf"^{re.escape(case)} +(\d+\.\d+) ", done.stdout, re.M)
        assert row, f"{case} in {done.stdout}"
        assert float(row[1]) > 0
    assert json.loads((tmp_path / "new" / "found.json").read_text())
    assert name != "step" or (tmp_path / "plot.png").read_bytes()[1:4] == b"PNG"


def test_scaling_is_simulated_within_its_limits():
    done = commands.run(sys.executable, ROOT / "benchmarks" / "scaling.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" ok\n") == 7
    assert "hierarchical, 4 a node, 1024 nodes" in done.stdout

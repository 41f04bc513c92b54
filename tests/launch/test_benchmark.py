"""The benchmark of `allreduce_grad`: it runs, compares right, and tells what is wrong."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PEERS = ["memcpy, one rank", "memcpy, all ranks", "handoff", "MPI_Allreduce", "bundled naive"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / "allreduce.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the benchmark, for the time of the test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module
    for name in {file.stem for file in FOLDER.glob("*.py")} - before:
        sys.modules.pop(name, None)


def test_quick_run_compares_all_and_all_are_right(tmp_path: Path) -> None:
    names = ["naive", "flat", "hierarchical", "two_dimensional", "single_node"]
    files = tmp_path / "new" / "all.json", tmp_path / "all.png"
    done = run("--quick", "--json", files[0], "--plot", files[1])
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(files[0].read_text())
    assert results["ranks"] == 2
    assert [model["arrays"] for model in results["models"]] == [1000, 6]
    for model in results["models"]:
        assert [row["name"] for row in model["contestants"]] == [*PEERS, *names]
        for row in model["contestants"]:
            assert row["right"], row["name"]
            assert len(row["ms"]) == results["rounds"]
            assert min(row["ms"]) > 0
            assert row["name"] in done.stdout
        assert model["limits"][0]["limit"] == "naive takes at most 1 x bundled naive"
        assert len(model["limits"]) == 3
    assert "\x1b" not in done.stdout  # no colours without a terminal
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_an_unknown_communicator_ends_the_run_and_the_known_are_listed(tmp_path: Path) -> None:
    done = run("--quick", "--communicator", "nave", "--json", tmp_path / "none.json")
    assert done.returncode != 0
    assert "naive" in done.stderr
    assert not (tmp_path / "none.json").exists()


def test_a_run_that_lasts_too_long_ends_with_stacks(tmp_path: Path) -> None:
    files = "--json", tmp_path / "none.json", "--plot", tmp_path / "none.png"
    done = run("--quick", "--repeat", 10**7, "--timeout", 3, *files)
    assert done.returncode != 0
    assert "most recent call first" in done.stderr, done.stdout + done.stderr
    assert "measure.py" in done.stderr, done.stderr


def test_resnet50_has_161_arrays_and_25_557_032_parameters(load: Any) -> None:
    shapes = load("shapes")
    model = shapes.MODELS["ResNet-50"]
    assert (len(model), shapes.elements(model)) == (161, 25_557_032)
    assert sum(len(shape) == 4 for shape in model.values()) == 53
    assert len(shapes.MODELS["1,000 arrays of 100"]) == 1000


def test_a_wrong_mean_is_noticed(load: Any) -> None:
    comm = SimpleNamespace(rank=0, size=2, allgather=lambda mine: [mine, mine])
    gradients = load("gradients").Gradients({"a": (3, 5), "b": (7,)}, comm)
    sources = [np.random.default_rng(rank).standard_normal(22, np.float32) for rank in (0, 1)]
    mean = (sources[0] + sources[1]) / 2
    assert gradients.is_mean(gradients.views(mean))
    for wrong in (np.nextafter(mean[3], 9) + 1e-5, np.nan):
        spoilt = mean.copy()
        spoilt[3] = wrong
        assert not gradients.is_mean(gradients.views(spoilt))
    comm.allgather = lambda mine: [mine, (True, b"other bits")]
    assert not gradients.is_mean(gradients.views(mean))


@pytest.mark.parametrize(("slower", "ok"), [(0.9, True), (1.0, True), (1.1, False)])
def test_a_slower_naive_misses_its_limit_and_sharing_is_told(
    load: Any, slower: float, ok: bool
) -> None:
    times = {
        "arithmetic, one rank": [1.0, 1.0, 1.0],
        "arithmetic, all ranks": [1.0, 1.0, 2.0],
        "memcpy, one rank": [1.0, 1.0, 1.0],
        "memcpy, all ranks": [1.0, 1.9, 2.1],
        "handoff": [2.0, 2.0, 2.0],
        "bundled naive": [4.0, 8.0, 40.0],  # ratios are of a round, so noise that lasts cancels
        "naive": [4.0 * slower, 8.0 * slower, 40.0 * slower],
    }
    rows = [{"name": name, "kind": "ours", "ms": ms} for name, ms in times.items()]
    model = load("report").summary("a model", 1, 25_557_032, rows, ranks=2)
    assert [found["rounds"] for found in model["sharing"].values()] == [1, 2]
    (limit,) = model["limits"]
    assert limit["ratio"] == [pytest.approx(slower)] * 3
    assert limit["ok"] is ok

"""The benchmark of `allreduce_grad`: it runs, compares right, and tells what is wrong."""

import importlib
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.jobs import commands
from tests.support.jobs.scripts import ROOT

FOLDER = ROOT / "benchmarks"
PEERS = [
    "memcpy, one rank",
    "memcpy, all ranks",
    "handoff",
    "MPI_Allreduce",
    "bundled naive",
]
NAMES = [
    "naive",
    "flat",
    "hierarchical",
    "two_dimensional",
    "single_node",
    "non_cuda_aware",
]
OURS = [*NAMES, "reproducible=True"]


def run(*arguments: object) -> commands.Done:
    return commands.run(
        sys.executable, FOLDER / "allreduce.py", *arguments, seconds=900
    )


@pytest.mark.full
def test_quick_run_compares_all_and_all_are_right(tmp_path: Path) -> None:
    results_file, plot = tmp_path / "new" / "all.json", tmp_path / "all.png"
    done = run(
        "--quick", "--repeat", 1, "--ranks", 2, "--json", results_file, "--plot", plot
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(results_file.read_text())
    assert results["ranks"] == 2
    assert [model["arrays"] for model in results["models"]] == [1000, 6]
    for model in results["models"]:
        names = [row["name"] for row in model["cases"] if row["name"] != "PyTorch gloo"]
        assert names == [*PEERS, *OURS, "dummy", "handshake alone", "barrier alone"]
        for row in model["cases"]:
            assert row["right"], row["name"]
            assert len(row["ms"]) == results["rounds"]
            assert min(row["ms"]) > 0
            assert row["name"] in done.stdout
        for limit in model["limits"]:
            assert f"{limit['limit']} " in done.stdout
            if "counted" in limit["limit"]:  # no time: known beforehand
                assert limit["ok"], limit
                assert limit["ratio"][1] == pytest.approx(3, abs=0.01)
    assert [size["bytes"] for size in results["sizes"]] == [
        1 << 10,
        1 << 12,
        1 << 14,
        1 << 16,
    ]
    for size in results["sizes"]:
        names = [row["name"] for row in size["cases"] if row["name"] != "PyTorch gloo"]
        assert names == [*PEERS[1:], *OURS]
        assert all(row["right"] and row["median_ms"] > 0 for row in size["cases"])
    assert "\x1b" not in done.stdout  # no colours without a terminal
    for file in (plot, tmp_path / "all-sizes.png"):
        assert file.read_bytes().startswith(b"\x89PNG")


def test_several_numbers_of_ranks_are_run_in_turn_into_files_of_their_own(
    tmp_path: Path,
) -> None:
    files = "--json", tmp_path / "all.json", "--plot", tmp_path / "all.png"
    more = "--repeat", 1, "--only", "models", "--communicator", "hierarchical"
    done = run("--quick", "--ranks", 1, 2, *more, *files)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [
        json.loads((tmp_path / name).read_text()) for name in ("all.json", "all-2.json")
    ]
    assert [results["ranks"] for results in found] == [1, 2]
    assert (tmp_path / "all-2.png").exists()
    assert not list(tmp_path.glob("*-sizes.png"))


def limits_of(load: Any, model: str, ranks: int) -> set[tuple[str, str, str]]:
    return {
        (limit.name, limit.reference, f"{limit.sense} {limit.bound:g}")
        for limit in load("limits").of(model, ranks)
        if limit.name != "naive"
    }


def test_limits_are_those_that_were_set(load: Any) -> None:
    both = ("hierarchical", "single_node")
    naive, handshake = "bundled naive", ("handshake alone", "hierarchical")
    beside = {
        "handoff": "at most 1.25",
        naive: "at least 1.4",
        "PyTorch gloo": "at least 4.5",
    }
    resnet = {(name, *limit) for name in both for limit in beside.items()}
    assert limits_of(load, "ResNet-50", 2) == resnet | {(*handshake, "at most 0.03")}
    a_third, thrice = (
        {(name, naive, f"at least {n}") for name in both} for n in (1.3, 3)
    )
    assert limits_of(load, "ResNet-50", 4) == a_third
    digits = limits_of(load, "digits MLP 64-100-100-10", 2)
    assert digits == a_third | {(*handshake, "at most 0.1")}
    assert limits_of(load, "1,000 arrays of 100", 2) == thrice


def test_a_limit_against_a_peer_that_is_not_there_is_told_as_not_measured(
    load: Any,
) -> None:
    limits, report = load("limits"), load("report")
    ms = {"hierarchical": np.array([1.0, 1.0]), "bundled naive": np.array([2.0, 1.3])}
    rows = [
        limit.judge(ms)
        for limit in limits.of("ResNet-50", 2)
        if limit.name == "hierarchical"
    ]
    assert [row["ok"] for row in rows] == [None, True, None]
    console = importlib.import_module("rich.console").Console(
        width=120, file=io.StringIO()
    )
    console.print(report.limits_table(rows))
    lines = [
        line for line in console.file.getvalue().splitlines() if "hierarchical" in line
    ]
    assert [line.split()[-1] for line in lines] == ["measured", "ok", "measured"]


def test_more_bytes_than_allowed_miss_their_limit(load: Any) -> None:
    judge = load("limits").judge_moved
    found = [judge("hierarchical", times)["ok"] for times in (4.01, 5.0)]
    assert found == [True, False]


def test_an_unknown_communicator_ends_the_run_and_the_known_are_listed(
    tmp_path: Path,
) -> None:
    done = run(
        "--quick",
        "--ranks",
        2,
        "--communicator",
        "nave",
        "--json",
        tmp_path / "none.json",
    )
    assert done.returncode != 0
    assert "naive" in done.stderr
    assert not (tmp_path / "none.json").exists()


@pytest.mark.full
def test_a_run_that_lasts_too_long_ends_with_stacks(tmp_path: Path) -> None:
    files = "--json", tmp_path / "none.json", "--plot", tmp_path / "none.png"
    done = run("--quick", "--ranks", 2, "--repeat", 10**7, "--timeout", 60, *files)
    assert done.returncode != 0
    assert "most recent call first" in done.stderr, done.stdout + done.stderr
    assert "allreduce.py" in done.stderr, done.stderr  # past its imports by then


def test_resnet50_has_161_arrays_and_25_557_032_parameters(load: Any) -> None:
    shapes = load("shapes")
    model = shapes.MODELS["ResNet-50"]
    assert (len(model), shapes.elements(model)) == (161, 25_557_032)
    assert sum(len(shape) == 4 for shape in model.values()) == 53
    assert len(shapes.MODELS["1,000 arrays of 100"]) == 1000


def test_a_wrong_mean_is_noticed(load: Any) -> None:
    comm = SimpleNamespace(rank=0, size=2, allgather=lambda mine: [mine, mine])
    gradients = load("gradients").Gradients({"a": (3, 5), "b": (7,)}, comm)
    sources = [
        np.random.default_rng(rank).standard_normal(22, np.float32) for rank in (0, 1)
    ]
    mean = (sources[0] + sources[1]) / 2
    assert gradients.is_mean(gradients.views(mean))
    for wrong in (np.nextafter(mean[3], 9) + 1e-5, np.nan):
        spoilt = mean.copy()
        spoilt[3] = wrong
        assert not gradients.is_mean(gradients.views(spoilt))
    comm.allgather = lambda mine: [mine, (True, b"other bits")]
    assert not gradients.is_mean(gradients.views(mean))


@pytest.mark.parametrize(("slower", "ok"), [(0.9, True), (1.0, True), (1.1, False)])
def test_a_slower_naive_misses_its_limit_and_sharing_is_told(load, slower, ok) -> None:
    times = {
        "arithmetic, one rank": [1.0, 1.0, 1.0],
        "arithmetic, all ranks": [1.0, 1.0, 2.0],
        "memcpy, one rank": [1.0, 1.0, 1.0],
        "memcpy, all ranks": [1.0, 1.9, 2.1],
        "handoff": [2.0, 2.0, 2.0],
        # Ratios are of a round, so noise that lasts cancels.
        "bundled naive": [4.0, 8.0, 40.0],
        "naive": [4.0 * slower, 8.0 * slower, 40.0 * slower],
    }
    rows = [{"name": name, "kind": "ours", "ms": ms} for name, ms in times.items()]
    model = load("report").summary("a model", 1, 25_557_032, {}, rows, ranks=2)
    assert [found["rounds"] for found in model["sharing"].values()] == [1, 2]
    (limit,) = model["limits"]
    assert limit["ratio"] == [pytest.approx(slower)] * 3
    assert limit["ok"] is ok

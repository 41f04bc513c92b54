"""The benchmark of training steps: it runs, tells what is wrong, and knows its names."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.jobs import commands
from tests.support.jobs.scripts import ROOT

FOLDER = ROOT / "benchmarks"
WAYS = ["no exchange", "barrier", "raw packing", "bundled naive", "dummy"]
WAYS += ["synchronous", "drift ignored", "double buffering", "overlapped"]
# The benchmark, in which each rank takes its weights for others than the other rank
# does.
SPOILT = """
import sys

sys.path.insert(0, {folder!r})
import jobs
import step

if jobs.is_rank():
    import step_ways
    from mpi4py import MPI

    weights = step_ways.Way.weights
    step_ways.Way.weights = lambda way: [each + MPI.COMM_WORLD.rank for each in weights(way)]
sys.exit(step.main())
"""


def test_a_short_run_times_all_ways_and_all_are_right(tmp_path: Path) -> None:
    file, plot = tmp_path / "new" / "steps.json", tmp_path / "other" / "steps.png"
    more = "--models", "digits", "--rounds", 3, "--json", file, "--plot", plot
    done = commands.run(sys.executable, FOLDER / "step.py", *more, seconds=900)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text())
    assert (results["ranks"], results["hosts"]) == (2, False)
    (model,) = results["models"]
    assert model["widths"] == [64, 100, 100, 10]
    assert [
        way["name"] for way in model["ways"] if way["name"] != "DDP over gloo"
    ] == WAYS
    for way in model["ways"]:
        assert way["right"], way["name"]
        assert len(way["ms"]) == 3 - model["disturbed"]
        assert min(way["ms"]) > 0
        assert f"\n {way['name']} " in done.stdout
        assert f"  {np.median(way['ms']):.3f}  " in done.stdout
    assert "3 rounds" in done.stdout
    assert "WRONG" not in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_ranks_with_different_weights_are_wrong_and_the_run_fails(
    tmp_path: Path,
) -> None:
    script = commands.program(tmp_path / "spoilt.py", SPOILT.format(folder=str(FOLDER)))
    files = "--json", tmp_path / "steps.json", "--plot", tmp_path / "steps.png"
    few = "--models", "digits", "--ways", "dummy", "synchronous", "--rounds", 1
    done = commands.run(sys.executable, script, *few, *files, seconds=900)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "WRONG" in line]
    assert [line.split()[0] for line in lines] == ["synchronous"]
    (model,) = json.loads((tmp_path / "steps.json").read_text())["models"]
    assert {way["name"]: way["right"] for way in model["ways"]} == {
        "no exchange": True,
        "dummy": True,
        "synchronous": False,
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--models", "digit"],
            "no model .* one machine .* 'digit'; take of: 'digits', 'u = 200'",
        ),
        (
            ["--hosts", "--models", "digits"],
            "no model .* hosts .* of: '3 layers, batch 1600', ",
        ),
        (
            ["--ways", "fast"],
            "no way .* 'fast'; take of: 'no exchange', .*, 'overlapped'",
        ),
        (
            ["--hosts", "--ways", "raw packing"],
            "no way .* hosts .* 'raw packing'; take of: ",
        ),
        (["--rounds", "0"], "must be 1 or more"),
        (["--ranks", "0"], "must be 1 or more"),
    ],
)
def test_wrong_arguments_are_named_beside_the_known_ones(
    words: list[str],
    said: str,
    load: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = load("step")
    monkeypatch.setattr(sys, "argv", ["step.py", *words])
    with pytest.raises(SystemExit) as ended:
        module.arguments()
    assert ended.value.code == 2
    assert re.search(said, capsys.readouterr().err)


def test_over_hosts_what_only_one_machine_tells_is_left_out(load: Any) -> None:
    names = load("step_names")
    assert names.ways_of(False) == [*WAYS, "DDP over gloo"]
    left_out = set(names.ways_of(False)) - set(names.ways_of(True))
    assert left_out == {"raw packing", "bundled naive", "dummy"}
    assert not set(names.models_of(True)) & set(names.models_of(False))


def result_of(**ms: list[float]) -> dict[str, Any]:
    ways = [
        {"name": name.replace("_", " "), "ms": each, "right": True}
        for name, each in ms.items()
    ]
    return {
        "model": "m",
        "widths": [2, 3],
        "batch": 4,
        "rounds": 3,
        "disturbed": 1,
        "ways": ways,
    }


def test_ratios_are_taken_round_by_round_and_what_was_not_timed_has_no_column(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    times = {
        "no_exchange": [1.0, 4.0],
        "synchronous": [2.0, 16.0],
        "double_buffering": [1.0, 12.0],
    }
    load("step_report").show(result_of(**times))
    said = capsys.readouterr().out
    assert "m: 2-3, batch 4; 3 rounds, 1 disturbed" in said
    assert not [
        title for title in ("/ floor", "/ bundled", "ms / DDP") if title in said
    ]
    rows = {line[:18].strip(): line[18:].split() for line in said.splitlines()}
    assert rows["synchronous"][-2:] == ["0.375", "1.000"]
    assert rows["double buffering"][-2:] == ["0.667", "0.625"]


def test_names_of_ways_are_whole_in_a_table_of_110_columns(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    names = load("step_names").WAYS
    long = {name.replace(" ", "_"): [12345.678, 12345.678] for name in names}
    load("step_report").show(result_of(**long))
    said = capsys.readouterr().out
    assert all(
        f"{name} " in said for name in [*names, "efficiency", "/ bundled", "ms / sync."]
    )
    assert "…" not in said
    assert said.count("12345.678 - 12345.678") == len(names)


def test_models_with_other_ways_and_fewer_rounds_are_drawn_together(
    load: Any, tmp_path: Path
) -> None:
    one = result_of(
        no_exchange=[1.0, 1.0, 1.0], synchronous=[2.0, 2.0, 3.0], barrier=[1.0] * 3
    )
    other = result_of(no_exchange=[1.0], synchronous=[2.0])
    file = tmp_path / "new" / "steps.png"
    load("step_report").draw({"ranks": 2, "hosts": True, "models": [one, other]}, file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_wrong_weights_are_noticed(load: Any) -> None:
    is_right = load("step_ways").is_right
    comm = SimpleNamespace(allgather=lambda mine: [mine, mine])
    apart = SimpleNamespace(allgather=lambda mine: [mine, [b"other bits"]])
    for name, weights, among, right in (
        ("synchronous", [1.0], comm, True),
        ("synchronous", [1.0], apart, False),
        ("overlapped", [np.nan], comm, False),
        ("barrier", [1.0], apart, True),  # whose gradients are its own
    ):
        way = SimpleNamespace(
            name=name, weights=lambda weights=weights: [np.array(weights)]
        )
        assert is_right(among, way) is right, name

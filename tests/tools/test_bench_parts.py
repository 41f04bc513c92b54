"""The parts of `chainermn bench`: values, sizes, factors, tables, picture, options. No MPI."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from chainermn_tools import plots, words
from chainermn_tools.bench import memory, plot, sizes, text, values
from chainermn_tools.bench.operations import OPERATIONS, REFERENCES
from chainermn_tools.commands import bench as command

ROOT = Path(__file__).resolve().parents[2]


def filled(size: int, rank: int = 0) -> np.ndarray:
    array = np.empty(size, np.float32)
    values.fill(array, rank)
    return array


@pytest.mark.parametrize("size", [1, 1000, 262_397, 300_000])
def test_right_values_are_right(size):
    array = filled(size, 3)
    assert values.is_filled(array, size, plus=3)
    assert values.is_filled(sum(filled(size, rank) for rank in range(3)), size, times=3, plus=3)
    assert values.is_filled(np.mean([filled(size, r) for r in range(3)], 0), size, plus=1)


def test_wrong_values_are_wrong():
    size = 300_000
    right = filled(size)
    one, swapped, late = right.copy(), right.copy(), right.copy()
    one[-1] += 1
    swapped[:4096], swapped[4096:8192] = right[4096:8192], right[:4096]
    late[65536:131072] = right[:65536]  # a chunk of the one before
    nan = right.copy()
    nan[7] = np.nan
    wrong = [one, swapped, late, nan, right[:-1], right.astype("f8"), list(right[:3]), None]
    assert not any(values.is_filled(array, size) for array in wrong)
    assert not values.is_filled(right, size, plus=1)
    assert not values.is_filled(filled(size, 1), size)


def test_factors_are_those_of_nccl_tests():
    kinds = {**OPERATIONS, **REFERENCES}
    for ranks in (1, 2, 3, 8, 1000):
        factors = {name: kind.bus_factor(ranks) for name, kind in kinds.items()}
        assert factors == {
            "mean_grad": 2 * (ranks - 1) / ranks,
            "allreduce": 2 * (ranks - 1) / ranks,
            "MPI_Allreduce": 2 * (ranks - 1) / ranks,
            "allgather": (ranks - 1) / ranks,
            "bcast": 1,
            "send": 1,
            "memcpy": 1,
        }


@pytest.mark.parametrize(
    ("written", "number"),
    [("1024", 1024), ("64k", 1 << 16), ("16MB", 1 << 24), ("1 GiB", 1 << 30), ("2T", 2 << 40)],
)
def test_sizes_are_read(written, number):
    assert sizes.parse(written) == number


@pytest.mark.parametrize("written", ["", "K", "-1K", "1.5M", "1X", "1e6", "9" * 30, "1K;id"])
def test_what_is_no_size_is_refused(written):
    with pytest.raises(ValueError, match="is no size"):
        sizes.parse(written)


def test_sizes_go_from_1_kib_by_fours():
    assert sizes.up_to(sizes.LARGEST) == [4**power << 10 for power in range(10)]
    assert sizes.up_to(5000) == [1024, 4096]
    written = [words.bytes_in_words(1 << power) for power in (0, 10, 16, 28, 30, 40, 50)]
    assert written == ["1 B", "1 KiB", "64 KiB", "256 MiB", "1 GiB", "1 TiB", "1024 TiB"]
    times = [words.time_in_words(seconds) for seconds in (12.34, 0.1239, 9.96e-5, 1.2e-6, 3e-8, 0)]
    assert times == ["12.3 s", "124 ms", "100 µs", "1.2 µs", "30 ns", "0"]


def cgroup(folder: Path, limit: str, used: str, value: object) -> Path:
    folder.mkdir()
    (folder / limit).write_text(f"{value}\n")
    (folder / used).write_text("600\n")
    (folder / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    return folder


def test_memory_is_what_the_cgroups_leave(tmp_path, monkeypatch):
    two = cgroup(tmp_path / "v2", "memory.max", "memory.current", 1000)
    one = cgroup(tmp_path / "v1", "memory.limit_in_bytes", "memory.usage_in_bytes", 800)
    none = cgroup(tmp_path / "no", "memory.max", "memory.current", "max")
    free = {"available_bytes": 1 << 40}
    monkeypatch.setattr(memory, "memory", lambda: free)
    for folders, expected in (((two,), 450), ((two, one), 250), ((none,), 1 << 40), ((), 1 << 40)):
        monkeypatch.setattr(memory, "cgroup_folders", lambda _, found=folders: found)
        assert memory.available_bytes(2) == int(memory.SHARE * expected / 2)
    free["available_bytes"] = 10
    assert memory.available_bytes(1) == 8


def report(ranks: int = 2, **changes: object) -> dict[str, object]:
    """One of which everything is known."""
    rows = []
    for power in range(10):
        size = 1024 * 4**power
        for name, operation in (("flat", "mean_grad"), ("flat", "bcast"), (None, "memcpy")):
            seconds = 1e-5 + size / (5e9 if operation == "memcpy" else 1e9)
            row = {"communicator": name, "operation": operation, "size": size, "bytes": size}
            algbw = size / seconds / 1e9
            rows.append(
                {
                    **row,
                    "right": True,
                    "seconds": seconds,
                    "algbw": algbw,
                    "busbw": algbw * (ranks > 1),
                }
            )
    known: dict[str, object] = {
        "ranks": ranks,
        "nodes": 1,
        "hosts": ["here"] * ranks,
        "cores": 2,
        "mpi": "MPICH 5",
        "right": True,
        "checks": [],
        "results": rows,
        "skipped": [],
    }
    return {**known, **changes}


def shown(found: dict[str, object], **console: Any) -> str:
    output = io.StringIO()
    text.render(found, Console(file=output, **console))
    return output.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 130, 250])
def test_tables_fit_the_terminal_and_leave_nothing_out(width):
    table = shown(report(), width=width, force_terminal=True, color_system=None)
    lines = [line for line in table.splitlines() if line.startswith(("flat", "bcast", "copy"))]
    columns = min(10, max(1, (width - text.NAME_WIDTH) // text.CELL_WIDTH))
    assert len(lines) == 3 * -(-10 // columns)
    assert all(len(line) <= max(width, text.NAME_WIDTH + text.CELL_WIDTH) for line in lines)
    for size in sizes.up_to(sizes.LARGEST):
        assert words.bytes_in_words(size) in table
    assert table.count("268 ms") == 2
    assert "…" not in table


def test_a_pipe_gets_one_plain_table():
    table = shown(report())
    assert "\x1b" not in table
    assert len([line for line in table.splitlines() if line.startswith("flat")]) == 1
    assert "All values of 30 checks were right." in table


def test_what_went_wrong_is_said():
    rows = report()["results"]
    assert isinstance(rows, list)
    bad = [{**row} for row in rows]
    bad[0] = {**bad[0], "right": False}
    bad[1] = {**bad[1], "right": False, "problem": "rank 1: ValueError: no"}
    del bad[1]["seconds"], bad[1]["busbw"]
    skipped = [
        {"communicator": "pure_nccl", "why": "[red]no GPU"},
        {"communicator": "single_node", "why": "two nodes"},
        {"communicator": "flat", "why": "two nodes"},
        {"bytes": 1 << 10, "why": "no time"},
        *({"bytes": each << 30, "why": "no memory"} for each in (1, 4, 16)),
    ]
    table = shown(report(results=bad, right=False, skipped=skipped))
    assert "flat, mean_grad of 1 KiB: wrong values" in table
    assert "flat, bcast of 1 KiB: rank 1: ValueError: no" in table
    assert "WRONG" in table
    assert "FAILED" in table
    assert "skipped pure_nccl: [red]no GPU" in table
    for name in ("single_node", "flat"):
        assert f"skipped {name}: two nodes" in table
    assert "skipped 1 KiB: no time" in table
    assert "skipped 1 GiB to 16 GiB: no memory" in table
    assert table.count("skipped") == 5
    assert "Not all is right." in table
    assert "Nothing ran." in shown(report(results=[], right=False))


@pytest.mark.parametrize("ranks", [1, 2])
def test_picture_has_a_line_for_each_way(tmp_path, ranks, monkeypatch):
    from matplotlib import pyplot as plt

    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    plot.draw(report(ranks), str(tmp_path / "bench.png"))
    image = plt.imread(tmp_path / "bench.png")
    assert min(image.shape[:2]) > 500
    gradients, arrays = drawn[0].axes
    for axes, names in ((gradients, {"flat"}), (arrays, {"bcast"})):
        assert {line.get_label() for line in axes.lines} == {*names, "copy in own memory"}
        assert axes.get_xscale() == axes.get_yscale() == "log"
        assert all(len(line.get_xdata()) == 10 for line in axes.lines)
        assert axes.get_legend() is not None
    assert ("bus" if ranks > 1 else "algorithm") in gradients.get_ylabel()
    monkeypatch.undo()
    plt.close(drawn[0])


def test_picture_of_nothing_is_drawn(tmp_path):
    plot.draw(report(results=[]), str(tmp_path / "empty.svg"))
    assert (tmp_path / "empty.svg").stat().st_size


def bench(*arguments: object, env: dict[str, str] | None = None) -> click.testing.Result:
    return CliRunner().invoke(command.bench, [str(one) for one in arguments], env=env)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--communicator", "flatt"], "no communicator 'flatt' to measure; use naive, flat,"),
        (["--communicator", "dummy"], "no communicator 'dummy'"),
        (["--max-size", "1X"], "'1X' is no size"),
        (["--max-size", "512"], "less than the smallest"),
        (["--plot", "/nowhere/bench.png"], "can't be written"),
        (["--plot", "bench.xyz"], "should end in one of"),
        (["--plot", "."], "can't be written"),
        (["-n", "0"], "0"),
        (["--seconds", "0"], "0"),
        (["--seconds", "nan"], "nan is no number of seconds"),
    ],
)
def test_wrong_options_are_named_before_anything_is_started(arguments, said, monkeypatch):
    monkeypatch.setattr(command, "_report", lambda *_: pytest.fail("started"))
    done = bench(*arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_a_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    monkeypatch.setattr(command, "_report", lambda *_: pytest.fail("started"))
    done = bench("--plot", "bench.png")
    assert done.exit_code == 2
    assert "chainermn-tools[plot]" in done.output


def test_another_number_of_ranks_than_the_launchers_is_refused(monkeypatch):
    monkeypatch.setattr(command, "_report", lambda *_: pytest.fail("started"))
    done = bench("-n", 2, env={"PMI_RANK": "0", "PMI_SIZE": "3"})
    assert done.exit_code == 2
    assert "started 3 ranks" in done.output


def test_the_status_says_whether_all_was_right(monkeypatch):
    for right, status in ((True, 0), (False, 1)):
        monkeypatch.setattr(command, "_report", lambda *_, good=right: report(right=good))
        assert bench().exit_code == status

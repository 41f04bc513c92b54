"""The tables, in terminals of any width."""

import io
from typing import Any

import pytest
from rich.console import Console

from chainermn_tools.bench import text
from tests.support.tools.bench import report


def shown(found: dict[str, object], **console: Any) -> str:
    output = io.StringIO()
    text.render(found, Console(file=output, **console))
    return output.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 130, 250])
def test_tables_fit_the_terminal_and_leave_nothing_out(width):
    table = shown(report(), width=width, force_terminal=True, color_system=None)
    lines = [
        line
        for line in table.splitlines()
        if line.startswith(("flat", "bcast", "copy"))
    ]
    for name in ("flat", "bcast", "copy"):
        assert 1 <= sum(line.startswith(name) for line in lines) <= 10 // (width // 40)
    assert all(len(line) <= width for line in lines)
    for size in (
        "1 KiB",
        "4 KiB",
        "16 KiB",
        "64 KiB",
        "256 KiB",
        "1 MiB",
        "64 MiB",
        "256 MiB",
    ):
        assert size in table
    assert table.count("268 ms") == 2
    assert "…" not in table


def test_a_pipe_gets_one_plain_table():
    table = shown(report())
    assert "\x1b" not in table
    assert len([line for line in table.splitlines() if line.startswith("flat")]) == 1
    assert "All values of 30 checks were right." in table


def test_what_went_wrong_is_said():
    bad: Any = report()["results"]
    bad[0] |= {"correct": False}
    bad[1] |= {"correct": False, "problem": "rank 1: ValueError: no"}
    del bad[1]["seconds"], bad[1]["busbw"]
    skipped = [
        {"communicator": "pure_nccl", "reason": "[red]no GPU"},
        {"communicator": "single_node", "reason": "two nodes"},
        {"communicator": "flat", "reason": "two nodes"},
        {"bytes": 1 << 10, "reason": "no time"},
        *({"bytes": each << 30, "reason": "no memory"} for each in (1, 4, 16)),
    ]
    table = shown(report(results=bad, correct=False, skipped=skipped))
    for words in (
        *(
            "flat, mean_grad of 1 KiB: wrong values",
            "flat, bcast of 1 KiB: rank 1: ValueError: no",
        ),
        *(
            "WRONG",
            "FAILED",
            "skipped pure_nccl: [red]no GPU",
            "skipped single_node: two nodes",
        ),
        *("skipped flat: two nodes", "skipped 1 KiB: no time"),
        *("skipped 1 GiB to 16 GiB: no memory", "Not all is right."),
    ):
        assert words in table
    assert table.count("skipped") == 5
    assert "Nothing ran." in shown(report(results=[], correct=False))

"""What `chainermn bench` prints if not all is well."""

from types import SimpleNamespace

import pytest
from rich.console import Console

from chainermn_tools.bench import table


@pytest.mark.parametrize(
    ("problems", "times", "last"),
    [
        (["flat, 1 KiB: wrong values"], {"flat": {}}, "Not all values were right."),
        ([], {}, "Nothing was measured."),
    ],
)
def test_what_went_wrong_is_said(problems, times, last):
    skipped = ["single_node: [red]two nodes"]
    report = SimpleNamespace(where="", sizes=[1024], times=times, problems=problems)
    report.skipped = skipped
    report.correct = False
    console = Console(width=80)
    with console.capture() as capture:
        table.render(report, console)
    said = capture.get().splitlines()
    assert said[-1] == last
    assert "not measured: single_node: [red]two nodes" in said
    assert {*problems} <= {*said}

"""The report as text."""

import io

from rich.console import Console

from chainermn_tools.environment import report


def test_text_says_what_is_unavailable_at_any_depth():
    found = {
        "schema": 1,
        "memory": {"total_bytes": 3 * 2**30, "small_bytes": 2**20, "limit_bytes": None},
        "gpus": {"driver": {"unavailable": "no driver"}, "devices": []},
        "topology": {"unavailable": "no mpiexec"},
        "launcher": {
            "description": ["very", "long"],
            "ranks": [{"rank": 0}, {"rank": 1}],
        },
    }
    file = io.StringIO()
    report.render(found, Console(file=file))
    lines = [" ".join(line.split()) for line in file.getvalue().splitlines()]
    sizes = {"total 3 GiB", "small 1 MiB", "limit none"}
    gpus = {"driver unavailable: no driver", "devices none"}
    assert sizes | gpus | {"unavailable: no mpiexec", "ranks rank 0", "rank 1"} <= set(
        lines
    )
    assert "very" not in file.getvalue()

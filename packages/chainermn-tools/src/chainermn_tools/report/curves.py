"""The learning curves: charts of the numbers in a log of LogReport."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

MOST_POINTS = 2000  # more points than a screen shows
X = "iteration"
NO_CURVES = {X, "epoch", "elapsed_time"}


def curves(log: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return a log's charts, and what they don't show; values with the same name share a chart.

    ``main/loss`` and ``validation/main/loss`` have the name ``loss``.
    """
    notes = []
    charts: dict[str, list[dict[str, Any]]] = {}
    for name in sorted({name for entry in log for name in entry} - NO_CURVES):
        series: dict[str, Any] = {"name": name, "x": [], "y": []}
        for number, entry in enumerate(log, 1):
            if name in entry:
                series["x"].append(entry.get(X, number))
                # False stands for a value that is no finite number.
                series["y"].append(is_number(entry[name]) and entry[name])
        bad = sum(value is False for value in series["y"])
        entries = len(series["y"])
        if bad:
            notes.append(f"{name} isn't a finite number in {bad} of {entries} entries.")
        if bad < entries:
            # Keep every `step`-th entry, and the last one.
            step = -(-entries // MOST_POINTS)
            for axis in ("x", "y"):
                series[axis] = series[axis][::-step][::-1]
            charts.setdefault(name.rpartition("/")[2], []).append(series)
    most_first = sorted(charts.items(), key=lambda chart: -len(chart[1]))
    named = [{"name": name, "series": series} for name, series in most_first]
    return {"by": X, "charts": named}, notes


def is_number(value: object) -> bool:
    """Return whether a value is a number that JSON and a screen can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max

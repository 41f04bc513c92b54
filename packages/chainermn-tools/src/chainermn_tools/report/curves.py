"""The learning curves: charts of the numbers in a log of LogReport."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

# More points than a screen shows, and more charts than a reader looks at.
MOST_POINTS, MOST_CHARTS = 2000, 24
X, NO_CURVES = "iteration", ("iteration", "epoch", "elapsed_time")


def curves(log: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the charts of a log, and what of it they don't show; values of one name share one.

    ``main/loss`` and ``validation/main/loss`` have the name ``loss``.
    """
    notes = []
    by = X if all(is_number(entry.get(X)) for entry in log) else "entry"
    charts: dict[str, list[dict[str, Any]]] = {}
    for name in sorted({name for entry in log for name in entry}.difference(NO_CURVES)):
        # False stands for what is no finite number.
        points = [
            (entry[X] if by == X else number, is_number(entry[name]) and entry[name])
            for number, entry in enumerate(log, 1)
            if name in entry
        ]
        bad = sum(value is False for _, value in points)
        if bad == len(points):
            notes.append(f"{name} has no finite numbers, and no curve.")
            continue
        if bad:
            notes.append(
                f"{name} isn't a finite number in {bad} of {len(points)} entries."
            )
        step = math.ceil(len(points) / MOST_POINTS)
        if step > 1:
            notes.append(f"The curve of {name} shows one of {step} entries.")
        x, y = zip(*points[::-step][::-1], strict=True)
        charts.setdefault(name.rpartition("/")[2], []).append(
            {"name": name, "x": x, "y": y}
        )
    if len(charts) > MOST_CHARTS:
        notes.append(
            f"Learning curves show {MOST_CHARTS} of {len(charts)} names of values."
        )
    chosen = sorted(charts.items(), key=lambda one: -len(one[1]))[:MOST_CHARTS]
    return {
        "by": by,
        "charts": [{"name": name, "series": each} for name, each in chosen],
    }, notes


def is_number(value: object) -> bool:
    """Return whether a value is a number that JSON and a screen can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # type: ignore[arg-type]

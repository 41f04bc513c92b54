"""The time lines of ranks: shares of time in bins, and the calls that a screen can show."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from chainermn_tools.trace.table import Run

# A screen shows a thousand columns and some dozens of rows; what is finer shows when it
# is zoomed.
MOST_RANKS, MOST_BINS, MOST_CELLS = 64, 8192, 1 << 19
# Of all ranks, the longest; shorter ones are seen in the bins.
MOST_CALLS = 20_000
FULL = 255  # what stands for a bin that is all waiting, or all in calls


def time_lines(run: Run, summary: dict[str, Any]) -> dict[str, Any]:
    """Return what shows the ranks' time lines, for JSON; times in microseconds.

    Args:
        run: its times are aligned, and its calls matched.
        summary: what `summarize` returned of it; calls around its longest waits are
            shown, too.
    """
    rows = sorted(summary["ranks"][:MOST_RANKS], key=lambda one: int(one["rank"]))
    length = float(run.table["end"].max(initial=0.0)) or 1.0
    bins = min(MOST_BINS, MOST_CELLS // len(rows))
    edges = np.linspace(0, length, bins + 1)
    lines = []
    for row in rows:
        parts = shares(run.ranks[row["rank"]].rows, edges)
        levels = (np.rint(FULL * part).astype(np.uint8).tobytes() for part in parts)
        waiting, inside = (base64.b64encode(level).decode() for level in levels)
        line = {
            "rank": row["rank"],
            "host": row["host"],
            "waiting": waiting,
            "inside": inside,
        }
        lines.append(line)
    calls = _calls(run, [row["rank"] for row in rows], summary)
    ranks = f"{len(rows)} of {len(run.ranks)} ranks"
    shown = f"Shown: {ranks}; singly, {len(calls['calls']['row'])} of {len(run.table)} calls."
    return {"length": length, "lines": lines, "shown": shown, **calls}


def _calls(run: Run, ranks: list[int], summary: dict[str, Any]) -> dict[str, Any]:
    """Return the calls to show, column by column, and whether these are all calls of the ranks."""
    table = run.table[np.isin(run.table["rank"], ranks)]
    chosen = np.argsort(table["start"] - table["end"], kind="stable")[:MOST_CALLS]
    for wait in summary["longest_waits"]:
        same = table["sequence"] == wait["number"]
        same &= table["communicator"] == run.names.index(wait["communicator"])
        chosen = np.append(chosen, np.flatnonzero(same))
    calls = table[np.unique(chosen)]
    used, operation = np.unique(calls["operation"], return_inverse=True)
    times = {
        name: np.round(calls[name], 1).tolist() for name in ("start", "end", "waited")
    }
    return {
        "complete": len(calls) == len(table),
        "names": [run.names[number] for number in used.tolist()],
        "calls": {
            "row": np.searchsorted(ranks, calls["rank"]).tolist(),
            "name": operation.tolist(),
            "late": calls["late"].tolist(),  # negative where nobody was waited for
            **times,
        },
    }


def shares(calls: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the shares of each bin that a rank waited, and that it was in calls; from 0 to 1."""
    start, end = calls["start"], calls["end"]
    inside = np.clip(_covered(start, end, edges), 0, 1)  # calls of several threads
    return np.clip(_covered(start, start + calls["waited"], edges), 0, inside), inside


def _covered(starts: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return how much of each bin the spans cover."""
    until = np.zeros(len(edges))  # time covered before each edge
    for moments, sign in ((np.sort(starts), 1), (np.sort(ends), -1)):
        counts = np.searchsorted(moments, edges)
        sums = np.concatenate(([0.0], np.cumsum(moments)))
        # The time since all moments before it.
        until += sign * (counts * edges - sums[counts])
    covered: np.ndarray = np.diff(until) / np.diff(edges)
    return covered

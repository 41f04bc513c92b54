"""The time lines of ranks: shares of time in bins, and the calls that a screen can show."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from chainermn_tools.trace.table import Run

# A screen shows a thousand columns and some dozens of rows; zooming shows finer
# details.
MOST_RANKS = 64
MOST_BINS = 8192
MOST_CELLS = 1 << 19
# The longest calls of all ranks; shorter calls are only seen in the bins.
MOST_CALLS = 20_000
FULL = 255  # the value of a bin that is all waiting, or all in calls


def time_lines(run: Run, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the ranks' time lines for JSON, with times in microseconds.

    The run's times are aligned, and its calls matched. The ranks are the first of its
    summary.
    """
    ranks = sorted(row["rank"] for row in summary["ranks"][:MOST_RANKS])
    length = run.length or 1.0
    bins = min(MOST_BINS, MOST_CELLS // len(ranks))
    edges = np.linspace(0, length, bins + 1)
    calls = _longest_calls(run, ranks)
    shown = f"Shown: {len(ranks)} of {len(run.ranks)} ranks"
    return {
        "length": length,
        "lines": [_line(run, rank, edges) for rank in ranks],
        "shown": f"{shown}; singly, {len(calls)} of {len(run.table)} calls.",
        "complete": len(calls) < MOST_CALLS,
        "names": run.names,
        "calls": _columns(calls, ranks),
    }


def _line(run: Run, rank: int, edges: np.ndarray) -> dict[str, Any]:
    """Return a rank's shares of the bins between edges."""
    calls = run.calls_of(rank)
    start = calls["start"]
    inside = _covered(start, calls["end"], edges)
    waiting = _covered(start, start + calls["waited"], edges)
    waiting = np.minimum(waiting, inside)
    return {
        "rank": rank,
        "host": run.ranks[rank].host,
        "waiting": _encoded(waiting),
        "inside": _encoded(inside),
    }


def _columns(calls: np.ndarray, ranks: list[int]) -> dict[str, Any]:
    """Return calls column by column; the late rank is negative if nobody was waited for."""
    columns = {}
    for name in ("start", "end", "waited"):
        columns[name] = np.round(calls[name], 1).tolist()
    columns["row"] = np.searchsorted(ranks, calls["rank"]).tolist()
    columns["name"] = calls["operation"].tolist()
    columns["late"] = calls["late"].tolist()
    return columns


def _encoded(share: np.ndarray) -> str:
    """Return the shares of bins, from 0 to 1, as the bytes that the page's script reads."""
    levels = np.rint(FULL * np.clip(share, 0, 1))
    text = levels.astype(np.uint8).tobytes()
    return base64.b64encode(text).decode()


def _longest_calls(run: Run, ranks: list[int]) -> np.ndarray:
    """Return the ranks' calls that are shown one by one, in the table's order."""
    table = run.table[np.isin(run.table["rank"], ranks)]
    longest = np.argsort(table["start"] - table["end"], kind="stable")
    calls: np.ndarray = table[np.sort(longest[:MOST_CALLS])]
    return calls


def _covered(starts: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return how much of each bin the spans cover."""
    until = _since(starts, edges) - _since(ends, edges)
    covered: np.ndarray = np.diff(until) / np.diff(edges)
    return covered


def _since(moments: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return for each edge the sum of the times since all earlier moments."""
    moments = np.sort(moments)
    counts = np.searchsorted(moments, edges)
    sums = np.append(0.0, np.cumsum(moments))
    since: np.ndarray = counts * edges - sums[counts]
    return since

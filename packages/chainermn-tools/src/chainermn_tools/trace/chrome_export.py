"""Writes one file of all ranks in Chrome's trace event format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from chainermn_tools.trace.table import CALL, NONE, Run, to_json


def write_chrome_trace(run: Run, path: str) -> None:
    """Write a run whose times are aligned: an array, an event a line, closed."""
    before = "[\n"
    with open(path, "w", encoding="utf-8") as file:
        for event in _events(run):
            file.write(before + event)
            before = ",\n"
        file.write("\n]\n")


def _events(run: Run) -> Iterator[str]:
    for trace in run.ranks.values():  # each rank has some calls
        yield from trace.other
    for row in run.table[np.argsort(run.table["start"], kind="stable")]:
        call = dict(zip(CALL.names or (), row.item(), strict=True))
        yield to_json(_event(call, run.names))


def _event(call: dict[str, Any], names: list[str]) -> dict[str, Any]:
    category = "message"
    peer = "peer"
    if call["sequence"] != NONE:
        category = "collective"
        peer = "root"
    known = {
        "bytes": call["nbytes"],
        "sequence": call["sequence"],
        peer: call["peer"],
        "tag": call["tag"],
        "waited": round(call["waited"], 3),
        "waited_for": call["late"],
    }
    args = {name: value for name, value in known.items() if value != NONE}
    args["communicator"] = names[call["communicator"]]
    if call["error"] != NONE:
        args["error"] = names[call["error"]]
    return {
        "name": names[call["operation"]],
        "cat": category,
        "ph": "X",
        "pid": call["rank"],
        "tid": call["thread"],
        "ts": round(call["start"], 3),
        "dur": round(call["end"] - call["start"], 3),
        "args": args,
    }

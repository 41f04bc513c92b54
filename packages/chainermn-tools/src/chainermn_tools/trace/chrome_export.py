"""Writes one file of all ranks in Chrome's trace event format."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from chainermn_tools.trace.table import Run, each_call, to_json


def write_chrome_trace(run: Run, path: str) -> None:
    """Write a run whose times are aligned: an array, an event a line, closed."""
    before = "["
    with open(path, "w", encoding="utf-8") as file:
        for event in _events(run):
            file.write(f"{before}\n{event}")
            before = ","
        file.write("\n]\n" if before == "," else "[]\n")


def _events(run: Run) -> Iterator[str]:
    for trace in run.ranks.values():
        yield from trace.other
    order = np.argsort(run.table["start"], kind="stable")
    for call in each_call(run.table[order], run.names):
        collective = call["sequence"] is not None
        args = {
            "communicator": call["communicator"],
            "bytes": call["nbytes"],
            "sequence": call["sequence"],
            "root" if collective else "peer": call["peer"],
            "tag": call["tag"],
            "error": call["error"],
            "waited": round(call["waited"], 3),
            "waited_for": call["late"],
        }
        event = {
            "name": call["operation"],
            "cat": "collective" if collective else "message",
            "ph": "X",
            "pid": call["rank"],
            "tid": call["thread"],
            "ts": round(call["start"], 3),
            "dur": round(call["end"] - call["start"], 3),
            "args": {name: value for name, value in args.items() if value is not None},
        }
        yield to_json(event)

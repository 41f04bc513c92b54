"""Trace files made up, of which all is known, and what `chainermn trace` reads from them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.random import default_rng

from chainermn_tools.trace import clocks, loader, matching, summary, table

NONE = table.NONE
RUN = "20261120T120000-abcdef"


class Made:
    """A trace file in the making; times in microseconds of the rank's own clock."""

    def __init__(self, folder: Path, rank: int, ranks: int, run: str = RUN, **about):
        folder.mkdir(exist_ok=True)
        self.path = folder / f"{run}.rank{rank}.json"
        self.rank = rank
        self.run = run
        known = {
            "host": "here",
            "process": 1,
            "began": 0.0,
            "clock": "one",
            "zero": 0.0,
        }
        said = {"schema": 1, "run": run, "rank": rank, "ranks": ranks, **known, **about}
        self.lines = ["["]
        self.metadata("chainermn", **said)
        self.metadata("process_name", name=f"rank {rank}")

    def metadata(self, event: str, **said) -> Made:
        line = {"name": event, "ph": "M", "pid": self.rank, "tid": 0, "args": said}
        self.lines.append(json.dumps(line) + ",")
        return self

    def communicator(self, name: str, ranks: list[int], run: str | None = None) -> Made:
        said = {"rank": ranks.index(self.rank), "ranks": ranks, "run": run or self.run}
        return self.metadata("chainermn communicator", communicator=name, **said)

    def clock(self, name: str, at: float, ahead: float, trip: float = 2.0) -> Made:
        said = {"at": at, "ahead": ahead, "round_trip": trip}
        return self.metadata("chainermn clock", communicator=name, **said)

    def call(self, operation: str, start: float, end: float, **said) -> Made:
        about = {"communicator": "0.1", "bytes": 0, **said}
        line = {"name": operation, "ph": "X", "pid": self.rank, "tid": 0, "ts": start}
        whole = {**line, "dur": end - start, "args": about}
        self.lines.append(json.dumps(whole) + ",")
        return self

    def write(self):
        self.path.write_text("\n".join(self.lines) + "\n")


def write_two(folder: Path, **changes):
    """Two ranks on one machine. Rank 1 comes 30 late to call 1, rank 0 comes 10 late to call 2."""
    first = Made(folder, 0, 2, **changes).communicator("0.1", [0, 1])
    first.call("allreduce", 100, 150, sequence=1, bytes=800)
    first.call("allreduce", 210, 240, sequence=2, bytes=800)
    first.call("send", 300, 350, peer=1, tag=5, bytes=64).write()
    second = Made(folder, 1, 2, **changes).communicator("0.1", [0, 1])
    second.call("allreduce", 130, 150, sequence=1, bytes=800)
    second.call("allreduce", 200, 240, sequence=2, bytes=800, error="ValueError")
    second.call("recv", 320, 352, peer=0, tag=5).write()


unaligned = loader.read  # a run whose times are still those of each rank's own clock


def matched(folder: Path) -> tuple[table.Run, list[table.Collective], int]:
    """A run with its clocks aligned, its collective calls, and how many are incomplete."""
    found = loader.read(folder)
    clocks.align(found)
    return found, *matching.match(found)


def calls(run: table.Run) -> list[SimpleNamespace]:
    """All ranks' calls, rank by rank."""
    found = []
    for row in run.table:
        fields = dict(zip(table.CALL.names, row.item(), strict=True))
        call = SimpleNamespace(**fields)
        call.operation = run.names[call.operation]
        found.append(call)
    return found


def summarized(folder: Path) -> dict[str, Any]:
    """What `chainermn trace --json` prints."""
    run, rows, incomplete = matched(folder)
    return summary.summarize(run, rows, incomplete, 1.5)


def write_many(folder: Path, ranks: int, calls: int):
    """A trace of many collective calls, counted on all ranks; rank 5 is often late."""
    rng = default_rng(1)
    made = [
        Made(folder, rank, ranks).communicator("0.1", [*range(ranks)])
        for rank in range(ranks)
    ]
    ready = np.zeros(ranks)
    for number in range(calls // ranks):
        start = ready + rng.exponential(800, ranks)
        start[5 % ranks] += 3000 * (number % 7 == 0)
        ready = start.max() + rng.uniform(100, 600) + rng.uniform(0, 5, ranks)
        for one, begun, end in zip(made, start.tolist(), ready.tolist(), strict=True):
            name = ("allreduce_grad", "allreduce", "bcast")[number % 3]
            one.call(name, begun, end, sequence=number, bytes=4_000_000)
    for one in made:
        one.write()

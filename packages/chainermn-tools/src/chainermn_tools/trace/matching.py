"""Finds out which rank waited for which: calls of different ranks that belong together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

import numpy as np

from chainermn_tools.trace.table import NONE, Collective, Run


def match(run: Run) -> tuple[list[Collective], int]:
    """Record in each call for how long it waited, and for which rank; times must be aligned.

    Return the collective calls of more than one rank in the order of time, and how many
    lack ranks.
    """
    waits = Waits(run.table)
    _match_messages(run, waits)
    members: dict[str, list[int]] = {}
    for trace in run.ranks.values():
        members.update(trace.members)
    operations = run.table["operation"]
    ranks = run.table["rank"]
    found = []
    incomplete = 0
    for (communicator, sequence), rows in _collectives(run).items():
        name = run.names[communicator]
        if sorted(rows) != sorted(members.get(name, [])):
            incomplete += 1
        elif len(rows) > 1:
            last, waited = waits.record_all(rows.values())
            call = Collective(
                at_seconds=waits.starts[last] / 1e6,
                operation=run.names[operations[last]],
                communicator=name,
                number=sequence,
                rank=int(ranks[last]),
                others_waited_seconds=waited / 1e6,
            )
            found.append(call)
    return sorted(found), incomplete


class Waits:
    """Records how long calls waited for other calls, by their rows in the table."""

    def __init__(self, table: np.ndarray) -> None:
        self.starts: list[float] = table["start"].tolist()
        self.ends: list[float] = table["end"].tolist()
        self._ranks = table["rank"]
        self._waited = table["waited"]  # a view, like the next array
        self._late = table["late"]

    def record(self, early: int, late: int) -> float:
        """Record that a call waited for a later one, and return for how long."""
        until = min(self.starts[late], self.ends[early])
        waited = max(0.0, until - self.starts[early])
        self._waited[early] = waited
        self._late[early] = self._ranks[late]
        return waited

    def record_all(self, rows: Collection[int]) -> tuple[int, float]:
        """Record that calls waited for the last one; return that, and the sum of waiting."""
        last = max(rows, key=lambda row: self.starts[row])
        waited = 0.0
        for row in rows:
            if row != last:
                waited += self.record(row, last)
        return last, waited


def _collectives(run: Run) -> dict[tuple[int, int], dict[int, int]]:
    """Return, by a call's communicator and number, its rows in the table by rank."""
    found: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    columns = run.table[["communicator", "sequence", "rank"]].tolist()
    for row, (communicator, sequence, rank) in enumerate(columns):
        # The last of several calls of a rank under one number counts.
        if sequence != NONE:
            found[communicator, sequence][rank] = row
    return found


def _match_messages(run: Run, waits: Waits) -> None:
    """Match the k-th sent message with the k-th received one, for each pair of ranks and tag."""
    sent: dict[tuple[int, ...], list[int]] = defaultdict(list)
    received: dict[tuple[int, ...], list[int]] = defaultdict(list)
    messages = np.flatnonzero(run.table["sequence"] == NONE)
    in_time = messages[np.argsort(run.table["start"][messages], kind="stable")]
    columns = run.table[["rank", "operation", "communicator", "peer", "tag"]]
    for row in in_time.tolist():
        rank, operation, communicator, peer, tag = columns[row].item()
        members = run.ranks[rank].members.get(run.names[communicator], [])
        if not 0 <= peer < len(members):
            continue
        other = members[peer]
        if run.names[operation].startswith("send"):
            sent[communicator, rank, other, tag].append(row)
        else:
            received[communicator, other, rank, tag].append(row)
    nbytes = run.table["nbytes"]
    for key, sends in sent.items():
        for send, receive in zip(sends, received[key], strict=False):
            # A receiver may not know the size.
            nbytes[receive] = nbytes[receive] or nbytes[send]
            if waits.starts[send] < waits.starts[receive]:
                waits.record(send, receive)
            else:
                waits.record(receive, send)

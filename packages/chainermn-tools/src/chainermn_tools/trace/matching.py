"""Finds out which rank waited for which: calls of different ranks that belong together."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from chainermn_tools.trace.table import NONE, Collective, Run


def match(run: Run) -> tuple[list[Collective], int]:
    """Record in each call for how long it waited, and for which rank; times must be aligned.

    Return the collective calls of more than one rank in the order of time, and how many
    lack ranks.
    """
    _match_messages(run)
    members: dict[str, set[int]] = {}
    for trace in run.ranks.values():
        for name, ranks in trace.members.items():
            members[name] = set(ranks)
    found = []
    incomplete = 0
    for (communicator, sequence), rows in _collectives(run).items():
        name = run.names[communicator]
        if rows.keys() != members.get(name):
            incomplete += 1
        elif len(rows) > 1:
            last, waited = _wait_for_last(run, list(rows.values()))
            call = run.table[last]
            found.append(
                Collective(
                    at_seconds=float(call["start"]) / 1e6,
                    operation=run.names[call["operation"]],
                    communicator=name,
                    number=sequence,
                    rank=int(call["rank"]),
                    others_waited_seconds=waited / 1e6,
                )
            )
    return sorted(found), incomplete


def _collectives(run: Run) -> dict[tuple[int, int], dict[int, int]]:
    """Return by communicator and number of a call its rows in the table, by rank."""
    found: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    columns = run.table[["communicator", "sequence", "rank"]].tolist()
    for row, (communicator, sequence, rank) in enumerate(columns):
        if (
            sequence != NONE
        ):  # the last of several calls of a rank under one number counts
            found[communicator, sequence][rank] = row
    return found


def _wait_for_last(run: Run, rows: list[int]) -> tuple[int, float]:
    """Record that calls waited for the one that came last; return that, and the sum of waiting."""
    last = rows[0]
    for row in rows:
        if run.table["start"][row] > run.table["start"][last]:
            last = row
    waited = sum(_wait(run, row, last) for row in rows if row != last)
    return last, waited


def _match_messages(run: Run) -> None:
    """Match the k-th that is sent with the k-th that is received, by pair of ranks and tag."""
    sent: dict[tuple[int, ...], list[int]] = defaultdict(list)
    received: dict[tuple[int, ...], list[int]] = defaultdict(list)
    columns = run.table[
        ["rank", "operation", "communicator", "sequence", "peer", "tag"]
    ]
    for row in np.argsort(run.table["start"], kind="stable").tolist():
        rank, operation, communicator, sequence, peer, tag = columns[row].item()
        members = run.ranks[rank].members.get(run.names[communicator], [])
        if sequence != NONE or not 0 <= peer < len(members):
            continue
        other = members[peer]
        if run.names[operation].startswith("send"):
            sent[communicator, rank, other, tag].append(row)
        else:
            received[communicator, other, rank, tag].append(row)
    for key, sends in sent.items():
        for send, receive in zip(sends, received[key], strict=False):
            if run.table["nbytes"][receive] == 0:  # unknown to the receiver
                run.table["nbytes"][receive] = run.table["nbytes"][send]
            if run.table["start"][send] < run.table["start"][receive]:
                _wait(run, send, receive)
            else:
                _wait(run, receive, send)


def _wait(run: Run, early: int, late: int) -> float:
    """Record that a call waited for another, by their rows; return for how long."""
    table = run.table
    until = min(table["start"][late], table["end"][early])
    waited = max(0.0, float(until - table["start"][early]))
    table["waited"][early] = waited
    table["late"][early] = table["rank"][late]
    return waited

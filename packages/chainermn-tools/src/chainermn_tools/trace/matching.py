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
    members: dict[str, list[int]] = {}
    for trace in run.ranks.values():
        members.update(trace.members)
    found = []
    incomplete = 0
    for (communicator, sequence), rows in _collectives(run).items():
        name = run.names[communicator]
        if sorted(rows) != sorted(members.get(name, [])):
            incomplete += 1
        elif len(rows) > 1:
            found.append(_wait_for_last(run, name, sequence, list(rows.values())))
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


def _wait_for_last(run: Run, name: str, sequence: int, rows: list[int]) -> Collective:
    """Record that the calls, rows of the table, waited for the one that came last."""
    last = rows[0]
    for row in rows:
        if run.table["start"][row] > run.table["start"][last]:
            last = row
    waited = 0.0
    for row in rows:
        if row != last:
            waited += _wait(run, row, last)
    call = run.table[last]
    return Collective(
        at_seconds=float(call["start"]) / 1e6,
        operation=run.names[call["operation"]],
        communicator=name,
        number=sequence,
        rank=int(call["rank"]),
        others_waited_seconds=waited / 1e6,
    )


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
            early = run.table[send]  # a view
            late = run.table[receive]
            late["nbytes"] = (
                late["nbytes"] or early["nbytes"]
            )  # a receiver may not know
            if early["start"] < late["start"]:
                _wait(run, send, receive)
            else:
                _wait(run, receive, send)


def _wait(run: Run, early: int, late: int) -> float:
    """Record that a call waited for another, by their rows; return for how long."""
    call = run.table[early]  # a view
    other = run.table[late]
    until = min(other["start"], call["end"])
    call["waited"] = max(0.0, until - call["start"])
    call["late"] = other["rank"]
    return float(call["waited"])

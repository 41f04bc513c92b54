"""Finds out which rank waited for which: calls of different ranks that belong together."""

from __future__ import annotations

import numpy as np

from chainermn_tools.trace.table import NONE, Run

# A collective call of several ranks as a row of a table; all of these ranks are known.
COLLECTIVE = np.dtype(
    [
        ("operation", "i4"),  # its name, on the rank that came last
        ("communicator", "i4"),  # its name
        ("sequence", "i8"),  # its number
        ("last", "i4"),  # the rank that came last
        ("start", "f8"),  # microseconds when that came
        ("waited", "f8"),  # microseconds that all others waited for it, in sum
    ]
)


def match(run: Run) -> tuple[np.ndarray, int]:
    """Record in each call for how long it waited, and for which rank; times must be aligned.

    Return the collective calls of more than one rank in the order of time, shape (n,),
    dtype ``COLLECTIVE``, and how many lack ranks.
    """
    _match_messages(run)
    table = run.table
    members = {
        name: ranks
        for trace in run.ranks.values()
        for name, ranks in trace.members.items()
    }
    order = np.flatnonzero(table["sequence"] != NONE)
    keys = np.stack(
        [table[name][order] for name in ("communicator", "sequence", "rank")]
    )
    by_key = np.lexsort(keys[::-1])
    order, keys = order[by_key], keys[:, by_key]
    # The last of several calls of a rank under one number counts.
    newest = np.append(_begins(keys), True)[1:]
    order, keys = order[newest], keys[:, newest]
    begins = _begins(keys[:2])
    first, group = np.flatnonzero(begins), np.cumsum(begins) - 1
    sizes = np.diff(np.append(first, len(order)))
    complete = np.zeros(len(first), bool)
    wanted = np.zeros(len(first), np.int64)
    for communicator in np.unique(table["communicator"][order]):
        ranks = sorted(set(members.get(run.names[communicator], ())))
        here = table["communicator"][order] == communicator
        known = np.isin(table["rank"][order[here]], ranks)
        has_nonmembers = np.bincount(group[here][~known], minlength=len(first)) > 0
        own = np.unique(group[here])
        wanted[own] = len(ranks)
        complete[own] = (sizes[own] == len(ranks)) & ~has_nonmembers[own]
    incomplete = int((~complete).sum())
    kept = (complete & (wanted > 1))[group]
    order, group = order[kept], group[kept]
    # The call that came last of each group; of equals the first rank's.
    by_time = np.lexsort((table["rank"][order], -table["start"][order], group))
    last = order[by_time[np.flatnonzero(np.diff(group[by_time], prepend=-1))]]
    number = np.cumsum(np.diff(group, prepend=-1) != 0) - 1 if len(group) else group
    mine = order[order != last[number]]
    _wait(table, mine, last[number[order != last[number]]])
    found = np.empty(len(last), COLLECTIVE)
    for name in ("operation", "communicator", "sequence", "start"):
        found[name] = table[name][last]
    found["last"] = table["rank"][last]
    found["waited"] = np.bincount(number, table["waited"][order], minlength=len(last))
    return found[np.argsort(found["start"], kind="stable")], incomplete


def _match_messages(run: Run) -> None:
    """Match the k-th that is sent with the k-th that is received, by pair of ranks and tag."""
    table = run.table
    message = np.flatnonzero((table["sequence"] == NONE) & (table["peer"] != NONE))
    peer = np.full(len(message), -1)
    for rank, communicator in np.unique(
        table[["rank", "communicator"]][message]
    ).tolist():
        ranks = np.array(
            run.ranks[rank].members.get(run.names[communicator], ()), np.int64
        )
        rows = table[message]
        here = (rows["rank"] == rank) & (rows["communicator"] == communicator)
        here &= (rows["peer"] >= 0) & (rows["peer"] < len(ranks))
        peer[here] = ranks[rows["peer"][here]]
    message, peer = message[peer >= 0], peer[peer >= 0]
    rows = table[message]
    sends = np.array([name.startswith("send") for name in run.names], bool)
    receives = ~sends[rows["operation"]] if len(message) else np.empty(0, bool)
    source = np.where(receives, peer, rows["rank"])
    target = np.where(receives, rows["rank"], peer)
    keys = np.stack([rows["communicator"], source, target, rows["tag"], receives])
    order = np.lexsort((rows["start"], *keys[::-1]))
    keys, places = keys[:, order], np.arange(len(order))
    # How many of the same keys come before each.
    count = places - np.maximum.accumulate(np.where(_begins(keys), places, 0))
    # A pair lies side by side: the same message, sent and then received.
    keys = np.concatenate([keys[:4], count[None], keys[4:]])
    pairs = np.lexsort(keys[::-1])
    same = (keys[:5, pairs[1:]] == keys[:5, pairs[:-1]]).all(axis=0)
    sent = message[order[pairs[:-1][same]]]
    received = message[order[pairs[1:][same]]]
    unknown = table["nbytes"][received] == 0
    table["nbytes"][received[unknown]] = table["nbytes"][sent[unknown]]
    sent_first = table["start"][sent] < table["start"][received]
    _wait(
        table,
        np.where(sent_first, sent, received),
        np.where(sent_first, received, sent),
    )


def _begins(keys: np.ndarray) -> np.ndarray:
    """Return for each column of keys, shape (k, n), whether it differs from the one before."""
    begins: np.ndarray = np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0))
    return begins[: keys.shape[1]]


def _wait(table: np.ndarray, early: np.ndarray, late: np.ndarray) -> None:
    """Record that calls waited for others, by their numbers in the table."""
    until = np.minimum(table["start"][late], table["end"][early])
    table["waited"][early] = np.maximum(0.0, until - table["start"][early])
    table["late"][early] = table["rank"][late]

"""Signatures of calls, which must be equal on all ranks, and the error that shows a difference."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from _chainermn_verdict import FOLLOWS

from .errors import RankMismatchError, rank_list

# The types of most values, except NumPy's numbers.
PLAIN = frozenset({str, int, bool, float, bytes, type(None)})


def mismatch_error(
    operation: str, rank: int, views: Sequence[str], calls: Sequence[str] = ()
) -> RankMismatchError:
    """Return the error that has every rank's values of the first entry that differs.

    ``views`` are views of the ranks' signatures, see :func:`view_of`, few of which
    differ. ``calls`` name each rank's call and its place. The error is secondary on all
    ranks except the first rank of the minority.
    """
    name, values = _first_difference(views)
    ranks_of = _grouped([values[view] for view in views])
    by_ranks = "; ".join(
        f"{value} on {rank_list(those)}" for value, those in ranks_of.items()
    )
    text = f"{operation} on rank {rank}: ranks disagree on {name}: {by_ranks}"
    if any(calls):
        called = ", ".join(
            f"{rank_list(those)} called {call}"
            for call, those in _grouped(calls).items()
        )
        text = f"{text} ({called})"
    error = RankMismatchError(text, name)
    few = min(reversed(ranks_of.values()), key=len)
    vars(error)[FOLLOWS] = rank != few[0]
    return error


def _first_difference(views: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the name of the first entry that differs, and its value in each view."""
    decoded = {view: json.loads(view) for view in dict.fromkeys(views)}
    for entries in zip_longest(*decoded.values(), fillvalue=("", "", "none")):
        if len({compared for _, compared, _ in entries}) > 1:
            break
    else:
        return "the number of calls so far", dict.fromkeys(decoded, "unknown")
    names = list(dict.fromkeys(name for name, *_ in entries if name))
    values = {}
    for view, (own, _, value) in zip(decoded, entries, strict=True):
        if len(names) > 1:
            value = f"{own} {value}".strip()
        values[view] = value
    return " or ".join(names), values


def _grouped(texts: Sequence[str]) -> dict[str, list[int]]:
    """Return the ranks that have each text, by text."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return ranks


def checked_signature(
    operation: str, signature: Iterable[tuple[Any, ...]]
) -> tuple[tuple[Any, ...], ...]:
    """Return a user's signature with NumPy's numbers as Python's, to be compared by ``repr``.

    TypeError is raised if an entry is no tuple that begins with a name.
    """
    entries = []
    for entry in signature:
        if not (isinstance(entry, tuple) and entry and isinstance(entry[0], str)):
            raise TypeError(
                f"the signature of {operation} must have tuples of a name and values, got {entry!r}"
            )
        if not all([type(value) in PLAIN for value in entry]):
            entry = _plain(entry)
        entries.append(entry)
    return tuple(entries)


def view_of(operation: str, signature: Iterable[tuple[Any, ...]]) -> str:
    """Return a text of the entries, by which ranks compare them and show the first difference."""
    entries = [("operation", operation), *checked_signature(operation, signature)]
    return json.dumps(
        [(name, repr(of), " ".join(map(str, of))) for name, *of in entries]
    )


def _plain(value: Any) -> Any:
    """Return NumPy's numbers, also in tuples, as Python's."""
    if isinstance(value, tuple):
        return tuple([_plain(each) for each in value])
    if isinstance(value, np.generic):
        return value.item()
    return value

"""What `chainermn explain` knows of an error's text, as the fix of a check."""

from __future__ import annotations

import io

from chainermn_tools.explain import Kind, search


def advice(text: str, otherwise: str) -> str:
    """What to do about an error.

    Args:
        text: what a program printed.
        otherwise: what to do when nothing in it is known.

    Returns:
        The first thing to try about the failure that says most.
    """
    known = [one.known for one in search(io.BytesIO(text.encode(errors="replace")))]
    telling = [row for row in known if row.kind in (Kind.CAUSE, Kind.GENERAL)]
    return telling[0].fix[0] if telling else otherwise


def last_line(text: str) -> str:
    """The last line that says something; empty if none does."""
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in reversed(lines) if set(line) - set("-=*#")), "")

"""The events that a job sends to `chainermn launch`, read from its standard error."""

from __future__ import annotations

import json
import re
from typing import Any

LAUNCH = "job-1"
# Of a job that is to send them.
ENVIRONMENT = {"CHAINERMN_LAUNCH": LAUNCH}
FRAME = re.compile(rf"\x1e{LAUNCH} (\d+) (\d+) (\d+) (\d+) ([ -~]*)\x1e\n")


def sent(text: str) -> list[dict[str, Any]]:
    """The events in their order; each that is there is whole."""
    parts: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    for rank, serial, number, count, part in FRAME.findall(text):
        parts.setdefault((rank, serial), []).append((int(number), int(count), part))
    found = []
    for (rank, _), pieces in parts.items():
        assert [number for number, _, _ in pieces] == [*range(pieces[0][1])], pieces
        event = json.loads("".join(piece for _, _, piece in pieces))
        assert (event["version"], event["rank"]) == (1, int(rank)), event
        found.append(event)
    return found


def the_only(kind: str, text: str) -> dict[str, Any]:
    """The one event of a kind."""
    (event,) = (event for event in sent(text) if event["event"] == kind)
    return event

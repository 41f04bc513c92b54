"""The events that a job sends to `chainermn launch`, read from its standard error."""

from __future__ import annotations

import json
import re
from typing import Any

LAUNCH = "job-1"
# Of a job that is to send them.
ENVIRONMENT = {"CHAINERMN_LAUNCH": LAUNCH}
LINE = re.compile(rf"\x1e{LAUNCH} (\{{[ -~]*\}})\n")


def sent(text: str) -> list[dict[str, Any]]:
    """The events in their order."""
    found = [json.loads(line) for line in LINE.findall(text)]
    for event in found:
        assert event["version"] == 1, found
    return found


def the_only(kind: str, text: str) -> dict[str, Any]:
    """The one event of a kind."""
    (event,) = (event for event in sent(text) if event["event"] == kind)
    return event

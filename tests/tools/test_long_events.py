"""Events of any length reach `chainermn launch` as lines that a pipe carries whole."""

from __future__ import annotations

import re

import pytest

from _chainermn_events import event_line
from chainermn_tools.long_events import shortened
from tests.support.watchdog.events import LAUNCH, sent


@pytest.mark.parametrize("long", ["x" * 10_000, "é" * 5000, "\x1e\n" * 3000])
def test_the_longest_texts_of_an_event_lose_their_middle(long):
    words = {"short": "y" * 200, "long": f"begin{long}end", "several": [long, 7]}
    fields = shortened({"words": words, "number": 1})
    line = event_line(LAUNCH, 7, "test", **fields)
    assert 3000 < len(line) <= 4096
    (event,) = sent(line.decode())
    assert event["number"] == 1
    found = event["words"]
    assert found["short"] == words["short"]
    assert re.fullmatch(r"begin.+\.\.\..+end", found["long"], re.DOTALL)
    assert found["several"][1] == 7

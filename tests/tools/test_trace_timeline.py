"""The time lines' data."""

from base64 import b64decode

import numpy as np

from chainermn_tools.trace import timeline
from tests.support.tools.traces import NONE, matched, summarized, write_two


def test_bins_and_calls_say_what_the_ranks_did(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MOST_BINS", 252)  # of 1 µs each, from 100 to 352
    write_two(tmp_path)
    found = timeline.time_lines(matched(tmp_path)[0], summarized(tmp_path))
    assert found["length"] == 252
    assert found["complete"]
    edges = {"waiting": [29, 199, 219], "inside": [49, 109, 139, 199, 249]}
    for name, places in edges.items():
        levels = np.frombuffer(b64decode(found["lines"][0][name]), np.uint8)
        assert {*levels} == {0, 255}
        assert np.flatnonzero(np.diff(levels)).tolist() == places
    assert found["calls"]["row"] == [0, 0, 0, 1, 1, 1]
    assert found["calls"]["late"] == [1, NONE, 1, NONE, 0, NONE]
    assert found["names"][found["calls"]["name"][-1]] == "recv"


def test_of_many_calls_the_longest_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MOST_CALLS", 1)
    monkeypatch.setattr(timeline, "MOST_RANKS", 1)
    write_two(tmp_path)
    found = timeline.time_lines(matched(tmp_path)[0], summarized(tmp_path))
    assert [line["rank"] for line in found["lines"]] == [1]  # the late one
    assert (found["complete"], found["calls"]["end"]) == (False, [140.0])
    assert found["shown"] == "Shown: 1 of 2 ranks; singly, 1 of 6 calls."

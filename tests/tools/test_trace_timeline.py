"""The time lines' data."""

from base64 import b64decode

import numpy as np
import pytest

from chainermn_tools.trace import timeline
from tests.support.tools.traces import matched, summarized, write_two


def test_shares_of_time_are_those_of_the_calls():
    edges = np.linspace(0, 1, 11)
    spans = np.array([(0.05, 0.25), (0.3, 0.4), (0.95, 1.0)])
    covered = timeline._covered(spans[:, 0], spans[:, 1], edges)
    assert covered == pytest.approx([0.5, 1, 0.5, 1, 0, 0, 0, 0, 0, 0.5])


def test_bins_and_calls_say_what_the_ranks_did(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "MOST_BINS", 252)  # of 1 µs each, from 100 to 352
    write_two(tmp_path)
    found = timeline.time_lines(matched(tmp_path)[0], summarized(tmp_path))
    assert found["length"] == 252
    first = found["lines"][0]
    waiting, inside = (
        np.frombuffer(b64decode(first[name]), np.uint8)
        for name in ("waiting", "inside")
    )
    assert [np.flatnonzero(np.diff(each)).tolist() for each in (waiting, inside)] == [
        [29, 199, 219],
        [49, 109, 139, 199, 249],
    ]
    assert {*waiting, *inside} == {0, 255}
    assert found["calls"]["row"] == [0, 0, 0, 1, 1, 1]
    late = [rank if rank >= 0 else None for rank in found["calls"]["late"]]
    assert late == [1, None, 1, None, 0, None]
    assert [found["names"][n] for n in found["calls"]["name"]][-1] == "recv"


def test_of_many_calls_the_longest_are_shown_and_those_of_the_longest_waits(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(timeline, "MOST_CALLS", 1)
    monkeypatch.setattr(timeline, "MOST_RANKS", 1)
    write_two(tmp_path)
    summary = summarized(tmp_path)
    del summary["longest_waits"][1:]  # call 1 is left, of two ranks
    found = timeline.time_lines(matched(tmp_path)[0], summary)
    assert [line["rank"] for line in found["lines"]] == [1]  # the late one
    assert (found["complete"], found["calls"]["row"]) == (False, [0, 0])
    assert found["shown"] == "Shown: 1 of 2 ranks; singly, 2 of 6 calls."

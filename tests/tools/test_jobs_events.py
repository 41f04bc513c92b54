"""What ranks tell the launcher in the stream of their output."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _chainermn_events import event_line
from chainermn_tools.jobs import events

JOB = "0123abcd"
ranks = st.integers(0, 999)
texts = st.binary(max_size=30).filter(lambda text: b"\x1e" not in text)
contents = st.dictionaries(
    st.text("abcd", max_size=5), st.text(max_size=50) | st.integers(), max_size=3
)


def taken(*pieces):
    """What is shown of a stream's pieces, and rank and fields of the events that are taken out."""
    found = []
    decoder = events.Decoder(JOB, found)
    shown = b"".join(map(decoder.feed, [*filter(None, pieces), b""]))
    for event in found:
        assert event.fields.pop("version") == 1
    return shown, [event.fields for event in found]


@settings(max_examples=100)
@given(st.lists(st.tuples(texts, ranks, contents), max_size=5), st.integers(1, 40))
def test_events_are_taken_out_wherever_the_stream_is_cut(said, size):
    stream = b""
    shown = b""
    sent = []
    for text, number, record in said:
        # A rank's tag before a record is the launcher's and goes with it.
        text = text.rstrip(b"] ") + b"."
        stream += text + event_line(JOB, number, "e", **record)
        shown += text
        sent.append({"event": "e", "rank": number, **record})
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert taken(*pieces) == (shown, sent)


EVENT = event_line(JOB, 3, "e", a=1)
SENT = {"event": "e", "rank": 3, "a": 1}


@pytest.mark.parametrize(
    "tag", [b"[3] ", b"[1,3]<stderr>: ", b"[prterun-a-1@1,3]<stderr>: "]
)
def test_the_tag_of_an_event_goes_with_it(tag):
    lines = tag + b"before\n" + tag + EVENT + tag + b"after\n"
    assert taken(lines) == (tag + b"before\n" + tag + b"after\n", [SENT])
    # A tag that comes before the rest of its line waits for it.
    assert taken(tag, EVENT + tag, b"after\n") == (tag + b"after\n", [SENT])


@pytest.mark.parametrize("piece", [b"[", b"[1,", b"\x1e"])
def test_output_that_looks_like_tags_or_marks_takes_no_longer(piece):
    """Quadratic time would be minutes."""
    for text in (piece * 60_000, piece * 60_000 + b"\n"):
        assert taken(text) == (text, [])


DAMAGED = [
    EVENT.replace(b'"version"', b'"vers"on"'),
    EVENT.replace(b'"rank": 3', b'"rank": null'),
    EVENT[:20] + b"of another rank\n" + EVENT[20:],
    event_line("other", 1, "e"),
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_event_or_that_of_another_job_is_shown_and_costs_no_other(line):
    newer = EVENT.replace(b'"version": 1', b'"version": 99')  # which is no output
    assert taken(line + newer + EVENT) == (line, [SENT])

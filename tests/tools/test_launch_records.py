"""What ranks tell the launcher in the stream of their output."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainermn_tools.launch import records

LAUNCH = "0123abcd"
ranks = st.integers(0, 999)
texts = st.binary(max_size=30).filter(lambda text: b"\x1e" not in text)
contents = st.dictionaries(st.text(max_size=5), st.text(max_size=50) | st.integers(), max_size=3)


@settings(max_examples=200)
@given(st.lists(st.tuples(texts, ranks, contents), max_size=5), texts, st.data())
def test_records_are_taken_out_wherever_the_stream_is_cut(said, last, data):
    stream, shown = b"", b""
    for serial, (text, number, record) in enumerate(said):
        # A rank's tag before a record is the launcher's and goes with it.
        text = text.rstrip(b"] ")
        stream += text + b"".join(records.frames(LAUNCH, number, serial, record))
        shown += text
    reader, got = records.Reader(LAUNCH), b""
    stream, shown = io.BytesIO(stream + b"." + last), shown + b"." + last
    while piece := stream.read(data.draw(st.integers(1, 40))):
        got += reader.feed(piece)
    got += reader.close()
    assert reader.records == [(number, record) for _, number, record in said]
    assert got.translate(None, b"\r\n") == shown.translate(None, b"\r\n")


@pytest.mark.parametrize("tag", [b"[3] ", b"[1,3]<stderr>: ", b"[prterun-a-1@1,3]<stderr>: "])
def test_the_tag_of_a_record_goes_with_it(tag):
    (frame,) = records.frames(LAUNCH, 3, 0, {"kind": "hello"})
    reader = records.Reader(LAUNCH)
    shown = reader.feed(tag + b"before\n" + tag + frame + tag + b"after\n")
    assert shown == tag + b"before\n" + tag + b"after\n"
    assert reader.records == [(3, {"kind": "hello"})]
    assert records.with_plain_ranks(shown) == b"[3] before\n[3] after\n"


def test_long_records_travel_in_frames_that_a_pipe_keeps_whole():
    record = {"traceback": "x" * 20_000 + "é\x1e\n"}
    frames = records.frames(LAUNCH, 1, 0, record)
    assert len(frames) > 5
    assert max(map(len, frames)) < 4096
    assert {frame.count(b"\n") for frame in frames} == {1}
    reader = records.Reader(LAUNCH)
    other = records.frames(LAUNCH, 2, 0, {"a": 1})[0]
    assert reader.feed(b"".join([*frames[:3], other, *frames[3:]])) == b""
    assert sorted(reader.records) == [(1, record), (2, {"a": 1})]


@pytest.mark.parametrize("text", [b"[" * 60_000, b"[1," * 20_000, b"\x1e" * 60_000])
def test_output_that_looks_like_tags_or_marks_takes_no_longer(text):
    """Quadratic time would be minutes."""
    reader = records.Reader(LAUNCH)
    assert records.with_plain_ranks(reader.feed(text) + reader.close()) == text


def test_anothers_records_and_a_lone_mark_are_shown():
    (frame,) = records.frames("other", 1, 0, {})
    reader = records.Reader(LAUNCH)
    text = frame + b"\x1e" + b"y" * 5000
    assert reader.feed(text) + reader.close() == text
    assert reader.records == []

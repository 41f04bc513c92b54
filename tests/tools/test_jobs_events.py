"""What ranks tell the launcher in the stream of their output."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _chainermn_events import encode
from chainermn_tools.jobs import events

JOB = "0123abcd"
ranks = st.integers(0, 999)
texts = st.binary(max_size=30).filter(lambda text: b"\x1e" not in text)
contents = st.dictionaries(
    st.text("abcd", max_size=5), st.text(max_size=50) | st.integers(), max_size=3
)


def an_event(**fields):
    return {"version": 1, "event": "e", **fields}


def fields(events):
    return [(event.rank, event.fields) for event in events]


@settings(max_examples=200)
@given(st.lists(st.tuples(texts, ranks, contents), max_size=5), texts, st.data())
def test_events_are_taken_out_wherever_the_stream_is_cut(said, last, data):
    stream, shown = b"", b""
    for serial, (text, number, record) in enumerate(said):
        # A rank's tag before a record is the launcher's and goes with it.
        text = text.rstrip(b"] ")
        stream += text + b"".join(encode(JOB, number, serial, an_event(**record)))
        shown += text
    found = []
    decoder, got = events.Decoder(JOB, found), b""
    stream, shown = io.BytesIO(stream + b"." + last), shown + b"." + last
    while piece := stream.read(data.draw(st.integers(1, 40))):
        got += decoder.feed(piece)
    got += decoder.close()
    assert fields(found) == [(number, an_event(**record)) for _, number, record in said]
    assert got.translate(None, b"\r\n") == shown.translate(None, b"\r\n")


@pytest.mark.parametrize("tag", [b"[3] ", b"[1,3]<stderr>: ", b"[prterun-a-1@1,3]<stderr>: "])
def test_the_tag_of_an_event_goes_with_it(tag):
    (frame,) = encode(JOB, 3, 0, an_event(pid=1))
    found = []
    decoder = events.Decoder(JOB, found)
    shown = decoder.feed(tag + b"before\n" + tag + frame + tag + b"after\n")
    assert shown == tag + b"before\n" + tag + b"after\n"
    assert fields(found) == [(3, an_event(pid=1))]
    assert events.normalize_tags(shown) == b"[3] before\n[3] after\n"


def test_long_events_travel_in_frames_that_a_pipe_keeps_whole():
    record = an_event(traceback="x" * 20_000 + "é\x1e\n")
    frames = encode(JOB, 1, 0, record)
    assert len(frames) > 5
    assert max(map(len, frames)) < 4096
    assert {frame.count(b"\n") for frame in frames} == {1}
    found = []
    decoder = events.Decoder(JOB, found)
    other = encode(JOB, 2, 0, an_event(a=1))[0]
    assert decoder.feed(b"".join([*frames[:3], other, *frames[3:]])) == b""
    assert sorted(fields(found), key=lambda one: one[0]) == [(1, record), (2, an_event(a=1))]


@pytest.mark.parametrize("text", [b"[" * 60_000, b"[1," * 20_000, b"\x1e" * 60_000])
def test_output_that_looks_like_tags_or_marks_takes_no_longer(text):
    """Quadratic time would be minutes."""
    decoder = events.Decoder(JOB, [])
    assert events.normalize_tags(decoder.feed(text) + decoder.close()) == text


def test_anothers_events_and_a_lone_mark_are_shown():
    (frame,) = encode("other", 1, 0, {})
    found = []
    decoder = events.Decoder(JOB, found)
    text = frame + b"\x1e" + b"y" * 5000
    assert decoder.feed(text) + decoder.close() == text
    assert fields(found) == []


def test_a_damaged_frame_costs_no_more_than_its_event():
    found = []
    decoder = events.Decoder(JOB, found)
    whole = encode(JOB, 0, 1, an_event(a=1))[0]
    damaged = [
        whole.replace(b'"version"', b'"vers"on"'),
        whole.replace(b"{", b"["),
        whole.replace(b": 1}", b": 99}").replace(b'"version": 1', b'"version": 99'),
        encode(JOB, 0, 2, an_event(text="x" * 5000))[1],
        whole.replace(b" 0 1 0 1 ", b" 0 1 7 1 ").replace(b"}", b""),
    ]
    after = encode(JOB, 0, 9, an_event(a=2))[0]
    assert decoder.feed(b"".join([*damaged, after])) == b""
    assert fields(found) == [(0, an_event(a=2))]


def test_events_that_never_become_whole_take_no_more_and_more_memory():
    decoder = events.Decoder(JOB, [])
    first, *_ = encode(JOB, 0, 0, an_event(text="x" * 5000))
    for serial in range(5 * events.MAX_INCOMPLETE):
        decoder.feed(first.replace(b" 0 0 0 ", b" 0 %d 0 " % serial))
    assert len(decoder._parts) <= events.MAX_INCOMPLETE + 1


HYDRA = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 1180 RUNNING AT vm
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
PRTE = "prterun noticed that process rank 1 with PID 7 on node vm exited on\nsignal 9 (Killed).\n"
PRTE_WRAPPED = PRTE.replace("on\nsignal 9", "on signal\n9")
PRTE_CODE = "   Process name: [prterun-vm-21834@1,1]\n   Exit code:    5\n"
Lost = events.LostProcess


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (HYDRA, Lost(1180, None, "vm", code=9, signal=9)),
        (PRTE, Lost(7, 1, "vm", signal=9)),
        (PRTE_WRAPPED, Lost(7, 1, "vm", signal=9)),
        (PRTE_CODE, Lost(rank=1, code=5)),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_what_mpiexec_reports_is_found_wherever_the_stream_is_cut(text, lost, size):
    reports = events.LauncherReports(tagged=False)
    data = (text + "much more\n" * 10_000).encode()
    for at in range(0, len(data), size):
        reports.feed(data[at : at + size])
    assert reports.lost == [lost]


def test_a_line_of_a_rank_is_no_report_where_ranks_lines_have_tags():
    reports = events.LauncherReports(tagged=True)
    for line in HYDRA.splitlines(keepends=True):
        reports.feed(f"[1] {line}".encode())
    assert reports.lost == []

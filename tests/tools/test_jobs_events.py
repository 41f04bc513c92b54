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


def taken(*pieces, job=JOB):
    """What is shown of a stream's pieces, and rank and fields of the events that are taken out."""
    found = []
    decoder = events.Decoder(job, found)
    shown = b"".join(map(decoder.feed, [*filter(None, pieces), b""]))
    for event in found:
        assert event.fields.pop("version") == 1
    return shown, [event.fields for event in found]


@settings(max_examples=200)
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


def test_an_event_in_the_middle_of_a_line_is_taken_out():
    line = event_line(JOB, 3, "e", text="x" * 3900)
    pieces = [b"[0] 50% \x1e", line[:100], line[100:3900], line[3900:] + b"done\n"]
    shown, sent = taken(*pieces)
    assert shown == b"[0] 50% \x1edone\n"
    assert len(sent) == 1


@pytest.mark.parametrize(
    "text", [b"[" * 60_000, b"[1," * 20_000, b"\x1e" * 60_000, b"\x1e" * 60_000 + b"\n"]
)
def test_output_that_looks_like_tags_or_marks_takes_no_longer(text):
    """Quadratic time would be minutes."""
    assert taken(text) == (text, [])


DAMAGED = [
    EVENT.replace(b'"version"', b'"vers"on"'),
    EVENT.replace(b"{", b"[").replace(b"}", b"]"),
    EVENT.replace(b'"rank": 3', b'"rank": null'),
    EVENT.replace(b'"version": 1, ', b'"version": 1, of another rank'),
    EVENT[:20] + b"of another rank\n" + EVENT[20:],
    event_line("other", 1, "e"),
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_event_or_that_of_another_job_is_shown_and_costs_no_other(line):
    newer = EVENT.replace(b'"version": 1', b'"version": 99')  # which is no output
    assert taken(line + newer + EVENT) == (line, [SENT])


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
# What a rank says of itself, before an mpiexec that names rank 0, process 0.
OMPI = (
    "[beta:02663] *** Process received signal ***\n[beta:02663] Signal: Segmentation fault (11)\n"
    "prterun has exited due to process rank 0 with PID 0 on node alpha calling\n"
)
Lost = events.LostProcess


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (HYDRA, Lost(1180, None, "vm", code=9, signal=9)),
        (PRTE, Lost(7, 1, "vm", signal=9)),
        (PRTE_WRAPPED, Lost(7, 1, "vm", signal=9)),
        (PRTE_CODE, Lost(rank=1, code=5)),
        (OMPI, Lost(2663, None, "beta", signal=11)),
    ],
)
def test_what_mpiexec_reports_is_found(text, lost):
    """But not where a rank prints it."""
    assert events.find_lost(f"before\n{text}after\n".encode()) == [lost]
    tagged = text.replace("\n", "\n[1] ").encode()
    assert events.find_lost(b"[1] " + tagged) == []

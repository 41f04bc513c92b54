"""What ranks tell the launcher in the stream of their output."""

import io

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


def fields(events):
    """What was sent: the ranks, and what isn't the same in all events."""
    return [
        (
            event.rank,
            {k: v for k, v in event.fields.items() if k not in ("version", "rank")},
        )
        for event in events
    ]


@settings(max_examples=200)
@given(st.lists(st.tuples(texts, ranks, contents), max_size=5), texts, st.data())
def test_events_are_taken_out_wherever_the_stream_is_cut(said, last, data):
    stream, shown = b"", b""
    for text, number, record in said:
        # A rank's tag before a record is the launcher's and goes with it.
        text = text.rstrip(b"] ")
        stream += text + event_line(JOB, number, "e", **record)
        shown += text
    found = []
    decoder, got = events.Decoder(JOB, found), b""
    stream, shown = io.BytesIO(stream + b"." + last), shown + b"." + last
    while piece := stream.read(data.draw(st.integers(1, 40))):
        got += decoder.feed(piece)
    got += decoder.close()
    assert fields(found) == [
        (number, {"event": "e", **record}) for _, number, record in said
    ]
    assert got == shown


@pytest.mark.parametrize(
    "tag", [b"[3] ", b"[1,3]<stderr>: ", b"[prterun-a-1@1,3]<stderr>: ", b" 3: "]
)
def test_the_tag_of_an_event_goes_with_it(tag):
    line = event_line(JOB, 3, "e", pid=1)
    found = []
    decoder = events.Decoder(JOB, found)
    shown = decoder.feed(tag + b"before\n" + tag + line + tag + b"after\n")
    assert shown == tag + b"before\n" + tag + b"after\n"
    assert fields(found) == [(3, {"event": "e", "pid": 1})]
    assert events.normalize_tags(shown, tag == b" 3: ") == b"[3] before\n[3] after\n"
    # A tag that comes before the rest of its line waits for it.
    pieces = tag, line + tag, b"after\n" + tag
    assert (
        b"".join(map(decoder.feed, pieces)) + decoder.close() == tag + b"after\n" + tag
    )


def test_each_ranks_lines_go_to_its_file_and_an_unfinished_one_is_left(tmp_path):
    left = events.write_logs(
        tmp_path, b"[0] a\n[12] b: [3]\nof nobody\n[0] \xff\n[0] c"
    )
    assert left == b"[0] c"
    assert events.write_logs(tmp_path, left + b"\n") == b""
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "rank-0.log": b"a\n\xff\nc\n",
        "rank-12.log": b"b: [3]\n",
    }


def test_an_event_in_the_middle_of_a_line_is_taken_out():
    found = []
    decoder = events.Decoder(JOB, found)
    line = event_line(JOB, 3, "e", text="x" * 3900)
    assert len(line) > 3900
    pieces = [b"[0] 50% \x1e", line[:100], line[100:3900], line[3900:] + b"done\n"]
    assert b"".join(map(decoder.feed, pieces)) == b"[0] 50% \x1edone\n"
    assert [event.rank for event in found] == [3]


@pytest.mark.parametrize(
    "text", [b"[" * 60_000, b"[1," * 20_000, b"\x1e" * 60_000, b"\x1e" * 60_000 + b"\n"]
)
def test_output_that_looks_like_tags_or_marks_takes_no_longer(text):
    """Quadratic time would be minutes."""
    decoder = events.Decoder(JOB, [])
    assert events.normalize_tags(decoder.feed(text) + decoder.close()) == text


def test_anothers_events_and_a_lone_mark_are_shown():
    found = []
    decoder = events.Decoder(JOB, found)
    text = event_line("other", 1, "e") + b"\x1e" + b"y" * 5000
    assert decoder.feed(text) + decoder.close() == text
    assert fields(found) == []


def test_a_damaged_event_is_shown_and_costs_no_other():
    found = []
    decoder = events.Decoder(JOB, found)
    whole = event_line(JOB, 0, "e", a=1)
    damaged = [
        whole.replace(b'"version"', b'"vers"on"'),
        whole.replace(b"{", b"[").replace(b"}", b"]"),
        whole.replace(b'"rank": 0', b'"rank": null'),
        whole.replace(b'"version": 1, ', b'"version": 1, of another rank'),
        whole[:20] + b"of another rank\n" + whole[20:],
    ]
    text = b"".join(damaged)
    after = event_line(JOB, 0, "e", a=2)
    newer = whole.replace(b'"version": 1', b'"version": 99')  # which is no output
    assert decoder.feed(text + newer + after) == text
    assert fields(found) == [(0, {"event": "e", "a": 2})]


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
# From real jobs of Slurm 22.05.
SRUN = "srun: error: beta: task 3: {}\nsrun: launch/slurm: _step_signal: Terminating StepId=7.0\n"
SRUN_OTHERS = "srun: error: alpha: tasks 0-1: Segmentation fault (core dumped)\n"
Lost = events.LostProcess


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (HYDRA, Lost(1180, None, "vm", code=9, signal=9)),
        (PRTE, Lost(7, 1, "vm", signal=9)),
        (PRTE_WRAPPED, Lost(7, 1, "vm", signal=9)),
        (PRTE_CODE, Lost(rank=1, code=5)),
        (OMPI, Lost(2663, None, "beta", signal=11)),
        (SRUN.format("Killed"), Lost(None, 3, "beta", signal=9)),
        (SRUN.format("Out Of Memory"), Lost(None, 3, "beta", signal=9)),
        (SRUN.format("Exited with exit code 3"), Lost(None, 3, "beta", code=3)),
        (SRUN_OTHERS, Lost(None, 0, "alpha", signal=11)),
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

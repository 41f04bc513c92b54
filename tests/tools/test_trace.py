"""`chainermn trace` on files made up here, of which all is known. No MPI."""

import json

import pytest

from tests.support.jobs.commands import invoke
from tests.support.tools.traces import (
    NONE,
    RUN,
    Made,
    calls,
    matched,
    summarized,
    write_two,
)


def said(*arguments: object, status: int = 0) -> str:
    """What `chainermn trace` prints."""
    done = invoke("trace", *arguments)
    assert done.exit_code == status, done.output
    return done.output


def test_who_waited_for_whom(tmp_path):
    write_two(tmp_path)
    run, collectives, incomplete = matched(tmp_path)
    assert incomplete == 0
    waits = {(c.rank, c.operation, c.sequence): (c.waited, c.late) for c in calls(run)}
    assert waits == {
        (0, "allreduce", 1): (30, 1),
        (1, "allreduce", 1): (0, NONE),
        (0, "allreduce", 2): (0, NONE),
        (1, "allreduce", 2): (10, 0),
        (0, "send", NONE): (20, 1),
        (1, "recv", NONE): (0, NONE),
    }
    last = [(call.rank, call.others_waited_seconds * 1e6) for call in collectives]
    assert last == [(1, pytest.approx(30)), (0, pytest.approx(10))]


def test_the_sums_are_right(tmp_path):
    write_two(tmp_path)
    found = summarized(tmp_path)
    operations = {row["operation"]: row for row in found["operations"]}
    assert operations["allreduce"] == {
        "operation": "allreduce",
        "calls": 4,
        "total_seconds": pytest.approx(140e-6),
        "median_seconds": pytest.approx(35e-6),
        "longest_seconds": pytest.approx(50e-6),
        "waiting_seconds": pytest.approx(40e-6),
        "bytes": 3200,
        "gb_per_second": pytest.approx(3200 / 100e-6 / 1e9),
        "raised": 1,
    }
    assert operations["recv"]["bytes"] == 64  # the receiver didn't know; the sender did
    assert found["ranks"][0] == {
        "rank": 1,
        "host": "here",
        "calls": 3,
        "in_calls_seconds": pytest.approx(92e-6),
        "waiting_seconds": pytest.approx(10e-6),
        "others_waited_seconds": pytest.approx(50e-6),
        "came_last": 1,
    }
    assert [row["number"] for row in found["longest_waits"]] == [1, 2]


def test_messages_are_matched_in_order_by_pair_and_tag(tmp_path):
    # The communicator turns ranks round.
    first = Made(tmp_path, 0, 2).communicator("0.1", [1, 0])
    first.call("send", 0, 1, peer=0, tag=1).call("send", 10, 60, peer=0, tag=2)
    first.call("send_obj", 70, 71, peer=0, tag=1).write()
    second = Made(tmp_path, 1, 2).communicator("0.1", [1, 0])
    second.call("recv", 40, 61, peer=1, tag=2).call("recv", 62, 63, peer=1, tag=1)
    second.call("recv_obj", 64, 75, peer=1, tag=1).write()
    run, _, _ = matched(tmp_path)
    waits = [(c.rank, c.operation, c.tag, c.waited, c.late) for c in calls(run)]
    assert waits == [
        (0, "send", 1, 1, 1),  # it left long before the receiver came
        (0, "send", 2, 30, 1),
        (0, "send_obj", 1, 0, NONE),
        (1, "recv", 2, 0, NONE),
        (1, "recv", 1, 0, NONE),
        (1, "recv_obj", 1, 6, 0),
    ]


@pytest.mark.parametrize("cut", [1, 3, 119])
def test_files_of_killed_ranks_are_read_as_far_as_they_go(tmp_path, cut):
    write_two(tmp_path)
    path = tmp_path / f"{RUN}.rank1.json"
    path.write_bytes(path.read_bytes()[:-cut])
    text = said(tmp_path)
    assert ("rank 1: 1 line can't" in text) == (cut > 1)
    assert f"{6 - (cut > 1)} calls in" in text


@pytest.mark.parametrize(
    "line",
    [
        '{"name": "x", "ph": "X"},',
        '{"name": "x", "ph": "X", "ts": NaN, "dur": 1, "pid": 0, "tid": 0, "args": {}},',
        '{"name": "chainermn clock", "ph": "M", "args": {"at": 1}},',
        "null,",
        '{"name": "x", "ph": "X", "ts": 1, "dur": 1, "pid": 0, "tid": 0, "args": '
        '{"communicator": "c", "bytes": 1e40}},',
        "[" * 100_000,
        "\0\xff,",
    ],
)
def test_damaged_lines_are_counted_and_left_out(tmp_path, line):
    write_two(tmp_path)
    with (tmp_path / f"{RUN}.rank0.json").open("a") as file:
        file.write(line + "\n")
    run, collectives, _ = matched(tmp_path)
    assert len(collectives) == 2
    assert any("rank 0: 1 line" in warning for warning in run.warnings)


def test_the_newest_run_is_taken_and_others_are_named(tmp_path):
    for hour in (10, 11, 12):
        name = f"20261120T{hour}0000-aaaaaa"
        Made(tmp_path, 0, 1, run=name).call(f"call{hour}", 0, 1).write()
    text = said(tmp_path)
    assert "call12" in text
    assert "--run: 20261120T110000-aaaaaa, 20261120T100000-aaaaaa" in text
    assert "call10" in said(tmp_path, "--run", "20261120T100000-aaaaaa")
    assert "call11" in said(tmp_path / "20261120T110000-aaaaaa.rank0.json")
    text = said(tmp_path, "--run", "x", status=2)
    assert "no run 'x'" in text
    assert "there are 20261120T100000-aaaaaa" in text


def test_missing_ranks_and_other_files_are_said(tmp_path):
    write_two(tmp_path)
    (tmp_path / f"{RUN}.rank0.json").unlink()
    (tmp_path / "merged.json").write_text("[]")
    (tmp_path / f"{RUN}.rank7.json").write_text("garbage")
    (tmp_path / f"{RUN}.rank8.json").write_text("")
    (tmp_path / f"{RUN}.rank9.json").mkdir()
    run, collectives, incomplete = matched(tmp_path)
    assert (len(collectives), incomplete) == (0, 2)
    assert run.warnings == [
        f"{RUN}.rank7.json is empty, or doesn't begin as a trace does",
        f"{RUN}.rank8.json is empty, or doesn't begin as a trace does",
        "no trace of 1 of 2 ranks: 0",
    ]


def test_without_a_trace_it_says_how_to_get_one(tmp_path):
    assert "CHAINERMN_TRACE=" in said(tmp_path, status=2)
    assert "can't be read: No such file" in said(tmp_path / "nowhere", status=2)
    (tmp_path / f"{RUN}.rank0.json").write_text("garbage")
    assert "doesn't begin" in said(tmp_path, status=2)


def test_merged_file_has_all_ranks_in_the_order_of_time(tmp_path):
    write_two(tmp_path / "traces")
    output = tmp_path / "merged.json"
    said(tmp_path / "traces", "--output", output)
    events = json.loads(output.read_text())
    written = [event for event in events if event["ph"] == "X"]
    assert len(written) == 6
    assert [call["ts"] for call in written] == sorted(call["ts"] for call in written)
    assert {event["pid"] for event in events} == {0, 1}
    others = [event["name"] for event in events if event["ph"] == "M"]
    assert others == ["process_name"] * 2
    assert written[0]["args"] == {
        "communicator": "0.1",
        "bytes": 800,
        "sequence": 1,
        "waited": 30,
        "waited_for": 1,
    }
    nowhere = said(tmp_path / "traces", "--output", "/nowhere/x.json", status=2)
    assert "can't be written" in nowhere


def test_tables_and_json_say_what_took_the_time_and_who_was_late(tmp_path):
    write_two(tmp_path, host="h")
    text = said(tmp_path)
    assert "2 ranks on 1 host, 6 calls in 252 µs; all share a clock" in text
    assert "raised on a rank: allreduce" in text
    worst = "Others wait most for rank 1 on h: 50 µs of 60 µs of all waiting"
    assert text.splitlines()[-1] == worst
    found = json.loads(said(tmp_path, "--json"))
    assert found == {**summarized(tmp_path), "clock_error_seconds": 0.0}


def test_a_run_without_calls_or_of_one_rank_is_shown(tmp_path):
    made = Made(tmp_path, 0, 1)
    made.write()
    assert "0 calls" in said(tmp_path)
    made.communicator("0.1", [0]).call("bcast", 0, 5, sequence=1).write()
    assert "No rank was waited for." in said(tmp_path)


@pytest.mark.parametrize(("lines", "status"), [(None, 0), (["["], 2)])
def test_what_files_hold_cannot_control_a_terminal(tmp_path, lines, status):
    bell = "\x1b]0;gotcha\x07\x1b[2J"
    made = Made(tmp_path, 0, 2, run=f"run{bell}", host=f"host{bell}")
    made.call(f"bcast{bell}", 0, 1, error=f"Error{bell}", communicator=f"0.1{bell}")
    made.lines = lines or made.lines
    made.write()
    text = said(tmp_path, status=status)
    assert "gotcha" in text
    assert all(c.isprintable() or c == "\n" for c in text), text

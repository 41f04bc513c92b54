"""`chainermn trace` on files made up here, of which all is known. No MPI."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.commands import invoke
from tests.support.tools.traces import (
    NONE,
    RUN,
    Made,
    calls,
    matched,
    write_two,
)


def said(*arguments: object, status: int = 0) -> str:
    """What `chainermn trace` prints."""
    done = invoke("trace", *arguments)
    assert done.exit_code == status, done.output
    return done.output


def expected(name: str) -> Any:
    """What is said of the two ranks of `write_two`."""
    return rounded((Path(__file__).with_name("two_ranks") / name).read_text())


def rounded(text: str) -> Any:
    """What JSON holds, with floats to the nanosecond."""
    return json.loads(text, parse_float=lambda number: round(float(number), 9))


def test_the_merged_file_has_all_calls_in_order_and_who_waited_for_whom(tmp_path):
    write_two(tmp_path / "traces")
    output = tmp_path / "merged.json"
    said(tmp_path / "traces", "--output", output)
    assert rounded(output.read_text()) == expected("merged.json")
    nowhere = said(tmp_path / "traces", "--output", "/nowhere/x.json", status=2)
    assert "can't be written" in nowhere


def test_tables_and_json_say_what_took_the_time_and_who_was_late(tmp_path):
    write_two(tmp_path)
    assert rounded(said(tmp_path, "--json")) == expected("summary.json")
    text = said(tmp_path)
    assert "2 ranks on 1 host, 6 calls in 252 µs; all share a clock" in text
    assert "raised on a rank: allreduce" in text
    worst = "Others wait most for rank 1 on here: 50 µs of 60 µs of all waiting"
    assert text.splitlines()[-1] == worst


def test_messages_are_matched_in_order_by_pair_and_tag(tmp_path):
    # The communicator turns ranks round.
    first = Made(tmp_path, 0, 2).communicator("0.1", [1, 0])
    # Nobody is the peer of the first message, whose line is damaged.
    first.call("send", 0, 1, peer=2, tag=1).call("send", 0, 1, peer=0, tag=1)
    first.call("send", 10, 60, peer=0, tag=2)
    first.call("send_obj", 70, 71, peer=0, tag=1).write()
    second = Made(tmp_path, 1, 2).communicator("0.1", [1, 0])
    second.call("recv", 40, 61, peer=1, tag=2).call("recv", 62, 63, peer=1, tag=1)
    second.call("recv_obj", 64, 75, peer=1, tag=1).write()
    run, _, _ = matched(tmp_path)
    assert [(call.waited, call.late) for call in calls(run)] == [
        (0, NONE),
        (1, 1),  # it left long before the receiver came
        (30, 1),
        (0, NONE),
        (0, NONE),
        (0, NONE),
        (6, 0),
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"name": "x", "ph": "X"},',
        '{"name": "x", "ph": "X", "ts": NaN, "dur": 1, "pid": 0, "tid": 0, "args": {}},',
        '{"name": "chainermn clock", "ph": "M", "args": {"at": 1}},',
        "null,",
        '{"name": "x", "ph": "X", "ts": 1, "dur": 1, "pid": 0, "tid": 0, "args": '
        '{"communicator": "c", "bytes": 1e40}},',
        pytest.param("[" * 100_000, id="deep"),
        "\0\xff,",
        '{"name": "x", "ph": "',  # of a rank that was killed
    ],
)
def test_damaged_lines_are_counted_and_left_out(tmp_path, line):
    write_two(tmp_path)
    with (tmp_path / f"{RUN}.rank1.json").open("ab") as file:
        file.write(line.encode("latin-1"))
    text = said(tmp_path)
    assert "rank 1: 1 line can't be read" in text
    assert "6 calls in 252 µs" in text


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
    (tmp_path / f"{RUN}.rank6.json").symlink_to("/proc/self/mem")
    (tmp_path / f"{RUN}.rank7.json").write_text("garbage")
    (tmp_path / f"{RUN}.rank8.json").write_text("")
    (tmp_path / f"{RUN}.rank9.json").mkdir()
    run, collectives, incomplete = matched(tmp_path)
    assert (len(collectives), incomplete) == (0, 2)
    assert run.warnings == [
        f"{RUN}.rank6.json can't be read: Input/output error",
        f"{RUN}.rank7.json is empty, or doesn't begin as a trace does",
        f"{RUN}.rank8.json is empty, or doesn't begin as a trace does",
        "no readable file of 1 rank: 0",
    ]
    last = "Whether a rank was waited for can't be told: files of ranks are missing."
    assert said(tmp_path).splitlines()[-1] == last
    assert "its name must end in .rankN.json" in said(
        tmp_path / "merged.json", status=2
    )


def test_without_a_trace_it_says_how_to_get_one(tmp_path):
    assert "CHAINERMN_TRACE=" in said(tmp_path, status=2)
    assert "can't be read: No such file" in said(tmp_path / "nowhere", status=2)
    (tmp_path / f"{RUN}.rank0.json").write_text("garbage")
    assert "doesn't begin" in said(tmp_path, status=2)


def test_a_run_without_calls_or_of_one_rank_is_shown(tmp_path):
    made = Made(tmp_path, 0, 1)
    made.write()
    assert "0 calls" in said(tmp_path)
    made.communicator("0.1", [0]).call("bcast_obj", 0, 5, sequence=1, bytes=9).write()
    assert "No rank was waited for in the calls that ended." in said(tmp_path)
    (row,) = json.loads(said(tmp_path, "--json"))["operations"]
    assert (row["bytes"], row["gb_per_second"]) == (9, None)


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

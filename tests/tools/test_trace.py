"""`chainermn trace` on files made up here, of which all is known. No MPI."""

import json
import re

import pytest

from tests.support.jobs.commands import invoke
from tests.support.tools.traces import (
    RUN,
    Made,
    calls,
    matched,
    shown,
    summarized,
    tables,
    write_two,
)


def refused(*arguments: object) -> str:
    """What `chainermn trace` says that can't do it."""
    done = invoke("trace", *arguments)
    assert done.exit_code == 2
    return " ".join(done.output.split())


def test_who_waited_for_whom(tmp_path):
    write_two(tmp_path)
    run, collectives, incomplete = matched(tmp_path)
    assert incomplete == 0
    waits = {(c.rank, c.operation, c.sequence): (c.waited, c.late) for c in calls(run)}
    assert waits == {
        (0, "allreduce", 1): (30, 1),
        (1, "allreduce", 1): (0, None),
        (0, "allreduce", 2): (0, None),
        (1, "allreduce", 2): (10, 0),
        (0, "send", None): (20, 1),
        (1, "recv", None): (0, None),
    }
    assert collectives[["last", "waited"]].tolist() == [(1, 30), (0, 10)]
    operations, ranks, stragglers = tables(tmp_path)
    total = operations["allreduce"]
    assert (total.calls, total.bytes, total.raised) == (4, 3200, 1)
    seconds = total.total_seconds, total.median_seconds, total.longest_seconds
    assert (*seconds, total.waiting_seconds) == pytest.approx(
        (140e-6, 35e-6, 50e-6, 40e-6)
    )
    assert total.gb_per_second == pytest.approx(3200 / 100e-6 / 1e9)
    assert operations["recv"].bytes == 64  # the receiver didn't know; the sender did
    assert [ranks[r].others_waited_seconds * 1e6 for r in (0, 1)] == pytest.approx(
        [10, 50]
    )
    assert [ranks[r].came_last for r in (0, 1)] == [1, 1]
    (late,) = stragglers
    assert (late.rank, late.came_last, late.calls) == (1, 1, 2)
    assert (late.others_waited_seconds, late.in_all_seconds) == pytest.approx(
        (30e-6, 40e-6)
    )


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
        (0, "send_obj", 1, 0, None),
        (1, "recv", 2, 0, None),
        (1, "recv", 1, 0, None),
        (1, "recv_obj", 1, 6, 0),
    ]


@pytest.mark.parametrize("cut", range(1, 120, 7))
def test_files_of_killed_ranks_are_read_as_far_as_they_go(tmp_path, cut):
    write_two(tmp_path)
    path = tmp_path / f"{RUN}.rank1.json"
    path.write_bytes(path.read_bytes()[:-cut])
    run, collectives, incomplete = matched(tmp_path)
    assert len(collectives) + incomplete == 2
    assert len(run.ranks[1].rows) == 2 + (cut <= 2)
    assert any("1 line of" in warning for warning in run.warnings) == (cut > 2)


@pytest.mark.parametrize(
    "line",
    [
        '{"name": "x", "ph": "X"},',
        '{"name": "x", "ph": "X", "ts": NaN, "dur": 1, "pid": 0, "tid": 0, "args": {}},',
        '{"name": "x", "ph": "X", "ts": 1, "dur": "a", "pid": 0, "tid": 0, "args": {}},',
        '{"name": "chainermn clock", "ph": "M", "args": {"at": 1}},',
        "null,",
        '{"name": "x", "ph": "X", "ts": 1, "dur": 1, "pid": 0, "tid": 0, "args": '
        '{"communicator": "c", "bytes": 1e40}},',
        "[" * 100_000,
        " " * (5 << 20),
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
    for hour, ranks in ((10, 4), (11, 1), (12, 2)):
        name = f"20261120T{hour}0000-aaaaaa"
        for rank in range(ranks):
            Made(tmp_path, rank, ranks, run=name).call("a", 0, hour).write()
    run = matched(tmp_path)[0]
    assert list(run.ranks) == [0, 1]
    assert {call.end for call in calls(run)} == {12}
    assert "20261120T100000-aaaaaa, 20261120T110000-aaaaaa" in run.warnings[0]
    assert list(matched(tmp_path, "20261120T100000-aaaaaa")[0].ranks) == [0, 1, 2, 3]
    said = refused(tmp_path, "--run", "x")
    assert "no run 'x'" in said
    assert "there are 20261120T100000-aaaaaa" in said


def test_groups_of_ranks_that_met_later_are_one_run(tmp_path):
    """Ranks 0 and 1 made a communicator, then 2 and 3 did, then all of them."""
    for rank in range(4):
        own = f"20261120T12000{rank // 2}-aaaaaa"
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        made = Made(tmp_path, rank, 4, run=own).communicator(f"{pair[0]}.1", pair)
        made.communicator("0.2", [0, 1, 2, 3], "20261120T120000-aaaaaa").call(
            "a", 0, 1
        ).write()
    Made(tmp_path, 0, 1, run="20261119T120000-aaaaaa").call("a", 0, 1).write()
    run = matched(tmp_path)[0]
    assert list(run.ranks) == [0, 1, 2, 3]
    assert len(run.warnings) == 1  # the older one


def test_missing_ranks_are_said(tmp_path):
    write_two(tmp_path)
    (tmp_path / f"{RUN}.rank0.json").unlink()
    run, collectives, incomplete = matched(tmp_path)
    assert (len(collectives), incomplete) == (0, 2)
    assert "no file of 1 of 2 ranks: 0" in run.warnings


def test_other_files_are_left_alone(tmp_path):
    write_two(tmp_path)
    (tmp_path / "merged.json").write_text("[]")
    (tmp_path / f"{RUN}.rank7.json").write_text("garbage")
    (tmp_path / f"{RUN}.rank8.json").write_text("")
    (tmp_path / f"{RUN}.rank9.json").mkdir()
    run, _, _ = matched(tmp_path)
    assert list(run.ranks) == [0, 1]
    said = [
        warning
        for warning in run.warnings
        if "doesn't begin as a trace does" in warning
    ]
    assert len(said) == 2


def test_without_a_trace_it_says_how_to_get_one(tmp_path):
    assert "CHAINERMN_TRACE=" in refused(tmp_path)
    assert "can't be read: No such file" in refused(tmp_path / "nowhere")
    (tmp_path / f"{RUN}.rank0.json").write_text("garbage")
    assert "doesn't begin" in refused(tmp_path)


def test_merged_file_has_all_ranks_in_the_order_of_time(tmp_path):
    write_two(tmp_path / "traces")
    output = tmp_path / "merged.json"
    done = invoke("trace", tmp_path / "traces", "--output", output)
    assert done.exit_code == 0, done.output
    assert "Others wait most for rank 1" in done.output
    events = json.loads(output.read_text())
    written = [event for event in events if event["ph"] == "X"]
    assert len(written) == 6
    assert [call["ts"] for call in written] == sorted(call["ts"] for call in written)
    assert {event["pid"] for event in events} == {0, 1}
    assert [event["name"] for event in events if event["ph"] == "M"] == [
        "process_name"
    ] * 2
    said = {
        "communicator": "0.1",
        "bytes": 800,
        "sequence": 1,
        "waited": 30,
        "waited_for": 1,
    }
    assert written[0]["args"] == said


def test_tables_say_what_took_the_time_and_who_was_late(tmp_path):
    write_two(tmp_path, host="h")
    said = shown(tmp_path)
    assert "\x1b" not in said
    assert "2 ranks on 1 host, 6 calls in 252 µs; clocks agree to within 1.5 µs" in said
    assert "allreduce raised in 1 call" in said
    rows = [line.split() for line in said.splitlines() if line.startswith("allreduce ")]
    assert rows[0][:2] == ["allreduce", "4"]
    late = next(row for row in rows if row[1] == "0.1")
    assert late[2:6] == ["2", "1", "1", "50%"]
    worst = "Others wait most for rank 1 on h: 50 µs of 60 µs of all waiting"
    assert said.splitlines()[-1] == worst


def test_json_has_what_the_tables_show_with_units_in_its_keys(tmp_path):
    write_two(tmp_path)
    done = invoke("trace", tmp_path, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found == {**summarized(tmp_path), "clock_error_seconds": 0.0}
    assert (found["schema"], found["calls"], found["seconds"]) == (
        1,
        6,
        pytest.approx(252e-6),
    )
    assert found["hosts"] == ["here"]
    assert [row["number"] for row in found["longest_waits"]] == [1, 2]
    assert found["warnings"] == ["allreduce raised in 1 call"]
    keys = {
        key
        for value in found.values()
        if isinstance(value, list)
        for row in value[:1]
        if isinstance(row, dict)
        for key in row
    }
    assert {"total_seconds", "gb_per_second", "others_waited_seconds", "share"} <= keys
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", key) for key in [*keys, *found])


@pytest.mark.parametrize("width", [30, 60, 200])
def test_tables_fit_the_terminal(tmp_path, width):
    write_two(tmp_path, host="a-host-with-a-long-name.of.a.cluster.example.org[red]")
    said = shown(tmp_path, width=width, force_terminal=True, color_system=None)
    assert "Others wait most for rank 1" in said
    tables = [
        line.rstrip()
        for line in said.splitlines()
        if line.startswith(("  ", "all", "op"))
    ]
    assert max(map(len, tables)) <= width
    for word in (
        "operation",
        "median",
        "longest",
        "waiting",
        "GB/s",
        "others waited",
        "allreduce",
    ):
        assert word in said, "no word is broken"
    if width >= 60:
        assert "a-host-with-a-long-name.of.a.cluster.example.org[red]" in said


def test_a_run_without_calls_or_of_one_rank_is_shown(tmp_path):
    Made(tmp_path, 0, 1).write()
    assert "0 calls" in shown(tmp_path)
    Made(tmp_path, 0, 1).communicator("0.1", [0]).call(
        "bcast", 0, 5, sequence=1
    ).write()
    assert "No rank was waited for." in shown(tmp_path)


def test_wrong_options_of_the_command_are_named(tmp_path):
    write_two(tmp_path)
    assert "can't be written" in refused(tmp_path, "--output", "/nowhere/x.json")


def test_what_files_hold_cannot_control_a_terminal(tmp_path):
    bell = "\x1b]0;gotcha\x07\x1b[2J"
    made = Made(tmp_path / "one", 0, 2, run=f"run{bell}", host=f"host{bell}")
    made.communicator(f"0.1{bell}", [0, 1])
    made.call(
        f"bcast{bell}", 0, 1, error=f"Error{bell}", communicator=f"0.1{bell}"
    ).write()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / f"run{bell}.rank0.json").write_text("[")
    for folder, status in (("one", 0), ("none", 2)):
        done = invoke("trace", tmp_path / folder)
        assert (done.exit_code, "gotcha" in done.output) == (status, True)
        assert all(c.isprintable() or c == "\n" for c in done.output), done.output

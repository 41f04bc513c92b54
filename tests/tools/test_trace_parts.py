"""The parts of `chainermn trace`, on files made up here, of which all is known. No MPI."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from chainermn_tools import plots
from chainermn_tools.commands import trace as command
from chainermn_tools.trace import clocks, merged, picture, reading, summary, text, waiting

RUN = "20261120T120000-abcdef"


class Made:
    """A trace file in the making; times in microseconds of the rank's own clock."""

    def __init__(self, folder: Path, rank: int, ranks: int, run: str = RUN, **about: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.path = folder / f"{run}.rank{rank}.json"
        self.rank, self.run = rank, run
        known = {"host": "here", "process": 1, "began": 0.0, "clock": "one", "zero": 0.0}
        said = {"schema": 1, "run": run, "rank": rank, "ranks": ranks, **known, **about}
        self.lines = ["["]
        self.note("chainermn", **said)
        self.note("process_name", name=f"rank {rank}")

    def note(self, event: str, **said: Any) -> Made:
        line = {"name": event, "ph": "M", "pid": self.rank, "tid": 0, "args": said}
        self.lines.append(json.dumps(line) + ",")
        return self

    def communicator(self, name: str, ranks: list[int], run: str | None = None) -> Made:
        said = {"rank": ranks.index(self.rank), "ranks": ranks, "run": run or self.run}
        return self.note("chainermn communicator", communicator=name, **said)

    def clock(self, name: str, at: float, ahead: float, trip: float = 2.0) -> Made:
        said = {"at": at, "ahead": ahead, "round_trip": trip}
        return self.note("chainermn clock", communicator=name, **said)

    def call(self, operation: str, start: float, end: float, **said: Any) -> Made:
        about = {"communicator": "0.1", "bytes": 0, **said}
        line = {"name": operation, "ph": "X", "pid": self.rank, "tid": 0, "ts": start}
        self.lines.append(json.dumps({**line, "dur": end - start, "args": about}) + ",")
        return self

    def write(self, more: str = "") -> None:
        self.path.write_text("\n".join(self.lines) + "\n" + more)


def write_two(folder: Path, **changes: Any) -> None:
    """Two ranks on one machine. Rank 1 comes 30 late to call 1, rank 0 comes 10 late to call 2."""
    first = Made(folder, 0, 2, **changes).communicator("0.1", [0, 1], changes.get("run"))
    first.call("allreduce", 100, 150, sequence=1, bytes=800)
    first.call("allreduce", 210, 240, sequence=2, bytes=800)
    first.call("send", 300, 350, peer=1, tag=5, bytes=64).write()
    second = Made(folder, 1, 2, **changes).communicator("0.1", [0, 1], changes.get("run"))
    second.call("allreduce", 130, 150, sequence=1, bytes=800)
    second.call("allreduce", 200, 240, sequence=2, bytes=800, error="ValueError")
    second.call("recv", 320, 352, peer=0, tag=5).write()


def read(folder: Path, wanted: str | None = None) -> tuple[reading.Run, list[waiting.Meeting], int]:
    run = reading.read(folder, wanted)
    clocks.align(run)
    return run, *waiting.match(run)


def test_who_waited_for_whom(tmp_path):
    write_two(tmp_path)
    run, meetings, incomplete = read(tmp_path)
    assert incomplete == 0
    waits = {(c.rank, c.operation, c.sequence): (c.waited, c.late) for c in run.calls}
    assert waits == {
        (0, "allreduce", 1): (30, 1),
        (1, "allreduce", 1): (0, None),
        (0, "allreduce", 2): (0, None),
        (1, "allreduce", 2): (10, 0),
        (0, "send", None): (20, 1),
        (1, "recv", None): (0, None),
    }
    assert [(m.last.rank, m.waited) for m in meetings] == [(1, 30), (0, 10)]
    rows = {row.operation: row for row in summary.by_operation(run)}
    total = rows["allreduce"]
    assert (total.count, total.nbytes, total.failed) == (4, 3200, 1)
    micros = (total.total * 1e6, total.median * 1e6, total.longest * 1e6, total.waited * 1e6)
    assert micros == pytest.approx((140, 35, 50, 40))
    assert total.bandwidth == pytest.approx(3200 / 100e-6)
    assert rows["recv"].nbytes == 64  # the receiver didn't know; the sender did
    ranks = {row.rank: row for row in summary.by_rank(run, meetings)}
    assert [ranks[r].kept * 1e6 for r in (0, 1)] == pytest.approx([10, 50])
    assert [ranks[r].last for r in (0, 1)] == [1, 1]
    (late,) = summary.by_lateness(meetings)
    assert (late.rank, late.times, late.count) == (1, 1, 2)
    assert (late.kept * 1e6, late.waited * 1e6) == pytest.approx((30, 40))


def test_messages_are_matched_in_order_by_pair_and_tag(tmp_path):
    first = Made(tmp_path, 0, 2).communicator("0.1", [1, 0])  # the communicator turns ranks round
    first.call("send", 0, 1, peer=0, tag=1).call("send", 10, 60, peer=0, tag=2)
    first.call("send_obj", 70, 71, peer=0, tag=1).write()
    second = Made(tmp_path, 1, 2).communicator("0.1", [1, 0])
    second.call("recv", 40, 61, peer=1, tag=2).call("recv", 62, 63, peer=1, tag=1)
    second.call("recv_obj", 64, 75, peer=1, tag=1).write()
    run, _, _ = read(tmp_path)
    waits = [(c.rank, c.operation, c.tag, c.waited, c.late) for c in run.calls]
    assert waits == [
        (0, "send", 1, 1, 1),  # it left long before the receiver came
        (0, "send", 2, 30, 1),
        (0, "send_obj", 1, 0, None),
        (1, "recv", 2, 0, None),
        (1, "recv", 1, 0, None),
        (1, "recv_obj", 1, 6, 0),
    ]


@pytest.mark.parametrize("drift", [0.0, 5e-5, -5e-5])
def test_clocks_are_aligned_with_drift_and_over_other_ranks(tmp_path, drift):
    """Rank 2 was compared with 1, and 1 with 0, whose times are the true ones."""

    def clock(rank: int, true: float) -> float:
        return true * (1 + rank * drift) + rank * 1e9

    moments = [1e3, 5e6, 60e6]
    Made(tmp_path, 0, 3, clock="0").communicator("0.1", [0, 1]).call("a", 70e6, 70e6 + 5).write()
    for rank in (1, 2):
        made = Made(tmp_path, rank, 3, clock=str(rank), zero=clock(rank, 0.0), began=99.0)
        for communicator in (1, 2)[rank - 1 :] if rank == 2 else (1, 2):
            members = [communicator - 1, communicator]
            made.communicator(f"0.{communicator}", members)
            if rank == communicator:
                for true in moments:
                    # A file counts from its zero; `ahead` leads to the other's clock.
                    at = clock(rank, true) - clock(rank, 0.0)
                    made.clock(f"0.{communicator}", at, clock(rank - 1, true) - at, trip=1.0)
        for true in (30e6, 70e6):
            at = clock(rank, true) - clock(rank, 0.0)
            made.call("a", at, at + 5, communicator="0.9")
        made.write()
    run = reading.read(tmp_path)
    assert clocks.align(run) == pytest.approx(1.0)
    assert run.remarks == []
    starts = {trace.rank: [call.start for call in trace.calls] for trace in run.ranks.values()}
    zero = starts[1][0]
    assert starts[0][0] - zero == pytest.approx(40e6, abs=20)
    assert starts[2] == pytest.approx(starts[1], abs=20)
    assert starts[1][1] - zero == pytest.approx(40e6, abs=20)


def test_a_shared_clock_beats_a_measured_one(tmp_path):
    for rank in (0, 1):
        made = Made(tmp_path, rank, 2, zero=1000.0 * rank).communicator("0.1", [0, 1])
        made.clock("0.1", 5, 77777.0, trip=500.0).call("bcast", 10, 20, sequence=1).write()
    run = reading.read(tmp_path)
    assert clocks.align(run) == 0
    assert [call.start for call in run.calls] == [0, 1000]


def test_comparisons_too_close_for_a_slope_give_none():
    link = clocks.Link(0, np.array([0.0, 1e4]), np.array([0.0, 10.0]), error=10.0)
    assert link.change(np.array([1e8]))[0] == 1e8 + 10
    exact = clocks.Link(0, np.array([0.0, 1e6]), np.array([0.0, 10.0]), error=1.0)
    assert exact.change(np.array([2e6, -1e6])) == pytest.approx([2e6 + 20, -1e6 - 10])
    back = exact.reversed(1)
    assert back.change(exact.change(np.array([5e5]))) == pytest.approx([5e5])


def test_clocks_that_nobody_compared_go_by_the_time_of_day(tmp_path):
    Made(tmp_path, 0, 2, began=100.0).call("a", 0, 1).write()
    Made(tmp_path, 1, 2, began=102.5, clock="other").call("a", 0, 1).write()
    run = reading.read(tmp_path)
    clocks.align(run)
    assert [call.start for call in run.calls] == [0, 2.5e6]
    assert "rank 1: its clock is only known by the time of day" in run.remarks


@pytest.mark.parametrize("cut", range(1, 120, 7))
def test_files_of_killed_ranks_are_read_as_far_as_they_go(tmp_path, cut):
    write_two(tmp_path)
    path = tmp_path / f"{RUN}.rank1.json"
    path.write_bytes(path.read_bytes()[:-cut])
    run, meetings, incomplete = read(tmp_path)
    assert len(meetings) + incomplete == 2
    assert len(run.ranks[1].calls) == 2 + (cut <= 2)
    assert any("1 line of" in remark for remark in run.remarks) == (cut > 2)


@pytest.mark.parametrize(
    "line",
    [
        '{"name": "x", "ph": "X"},',
        '{"name": "x", "ph": "X", "ts": NaN, "dur": 1, "pid": 0, "tid": 0, "args": {}},',
        '{"name": "x", "ph": "X", "ts": 1, "dur": "a", "pid": 0, "tid": 0, "args": {}},',
        '{"name": "chainermn clock", "ph": "M", "args": {"at": 1}},',
        "null,",
        "[" * 100_000,
        "\0\xff,",
    ],
)
def test_damaged_lines_are_counted_and_left_out(tmp_path, line):
    write_two(tmp_path)
    with (tmp_path / f"{RUN}.rank0.json").open("a") as file:
        file.write(line + "\n")
    run, meetings, _ = read(tmp_path)
    assert len(meetings) == 2
    assert any("rank 0: 1 line" in remark for remark in run.remarks)


def test_the_newest_run_is_taken_and_others_are_named(tmp_path):
    for hour, ranks in ((10, 4), (11, 1), (12, 2)):
        name = f"20261120T{hour}0000-aaaaaa"
        for rank in range(ranks):
            Made(tmp_path, rank, ranks, run=name).call("a", 0, hour).write()
    run = reading.read(tmp_path)
    assert list(run.ranks) == [0, 1]
    assert {call.end for call in run.calls} == {12}
    assert "20261120T100000-aaaaaa, 20261120T110000-aaaaaa" in run.remarks[0]
    assert list(reading.read(tmp_path, "20261120T100000-aaaaaa").ranks) == [0, 1, 2, 3]
    with pytest.raises(reading.NoTrace, match=r"no run 'x'.*there are 20261120T100000-aaaaaa"):
        reading.read(tmp_path, "x")


def test_groups_of_ranks_that_met_later_are_one_run(tmp_path):
    """Ranks 0 and 1 made a communicator, then 2 and 3 did, then all of them."""
    for rank in range(4):
        own = f"20261120T12000{rank // 2}-aaaaaa"
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        made = Made(tmp_path, rank, 4, run=own).communicator(f"{pair[0]}.1", pair)
        made.communicator("0.2", [0, 1, 2, 3], "20261120T120000-aaaaaa").call("a", 0, 1).write()
    Made(tmp_path, 0, 1, run="20261119T120000-aaaaaa").call("a", 0, 1).write()
    run = reading.read(tmp_path)
    assert list(run.ranks) == [0, 1, 2, 3]
    assert len(run.remarks) == 1  # the older one


def test_missing_ranks_are_said(tmp_path):
    write_two(tmp_path)
    (tmp_path / f"{RUN}.rank0.json").unlink()
    run, meetings, incomplete = read(tmp_path)
    assert (meetings, incomplete) == ([], 2)
    assert "no file of 1 of 2 ranks: 0" in run.remarks


def test_other_files_are_left_alone(tmp_path):
    write_two(tmp_path)
    (tmp_path / "merged.json").write_text("[]")
    (tmp_path / f"{RUN}.rank7.json").write_text("garbage")
    (tmp_path / f"{RUN}.rank8.json").write_text("")
    (tmp_path / f"{RUN}.rank9.json").mkdir()
    run, _, _ = read(tmp_path)
    assert list(run.ranks) == [0, 1]
    said = [remark for remark in run.remarks if "doesn't begin as a trace does" in remark]
    assert len(said) == 2


def test_without_a_trace_it_says_how_to_get_one(tmp_path):
    with pytest.raises(reading.NoTrace, match="CHAINERMN_TRACE="):
        reading.read(tmp_path)
    with pytest.raises(reading.NoTrace, match="No such file"):
        reading.read(tmp_path / "nowhere")
    (tmp_path / f"{RUN}.rank0.json").write_text("garbage")
    with pytest.raises(reading.NoTrace, match="doesn't begin"):
        reading.read(tmp_path)


def test_merged_file_has_all_ranks_in_the_order_of_time(tmp_path):
    write_two(tmp_path)
    run, _, _ = read(tmp_path)
    output = io.StringIO()
    merged.write(run, output)
    events = json.loads(output.getvalue())
    calls = [event for event in events if event["ph"] == "X"]
    assert len(calls) == 6
    assert [call["ts"] for call in calls] == sorted(call["ts"] for call in calls)
    assert {event["pid"] for event in events} == {0, 1}
    assert [event["name"] for event in events if event["ph"] == "M"] == ["process_name"] * 2
    assert calls[0]["args"] == {
        "communicator": "0.1",
        "bytes": 800,
        "sequence": 1,
        "waited": 30,
        "waited_for": 1,
    }
    empty = io.StringIO()
    merged.write(reading.Run("x", {}, []), empty)
    assert json.loads(empty.getvalue()) == []


def shown(folder: Path, **console: Any) -> str:
    run, meetings, incomplete = read(folder)
    output = io.StringIO()
    text.render(run, meetings, incomplete, 1.5, Console(file=output, highlight=False, **console))
    return output.getvalue()


def test_tables_say_what_took_the_time_and_who_was_late(tmp_path):
    write_two(tmp_path, host="h")
    said = shown(tmp_path)
    assert "\x1b" not in said
    assert "2 ranks on 1 host, 6 calls in 252 µs; clocks agree to within 1.5 µs" in said
    assert "allreduce raised in 1 call" in said
    rows = [line.split() for line in said.splitlines() if line.startswith("allreduce ")]
    assert rows[0][:2] == ["allreduce", "4"]
    late = next(row for row in rows if row[1] == "0.1")
    assert late[2:6] == ["2", "1", "1", "(50%)"]
    last = said.splitlines()[-1]
    assert (
        last == "Others wait most for rank 1 on h: 50 µs of the 60 µs that ranks waited, together"
    )


@pytest.mark.parametrize("width", [30, 60, 200])
def test_tables_fit_the_terminal(tmp_path, width):
    write_two(tmp_path, host="a-host-with-a-long-name.of.a.cluster.example.org[red]")
    said = shown(tmp_path, width=width, force_terminal=True, color_system=None)
    assert "Others wait most for rank 1" in said
    tables = [line.rstrip() for line in said.splitlines() if line.startswith(("  ", "all", "op"))]
    assert max(map(len, tables)) <= width
    for word in ("operation", "median", "longest", "waiting", "GB/s", "others waited", "allreduce"):
        assert word in said, "no word is broken"
    if width >= 60:
        assert "a-host-with-a-long-name.of.a.cluster.example.org[red]" in said


def test_a_run_without_calls_or_of_one_rank_is_shown(tmp_path):
    Made(tmp_path, 0, 1).write()
    assert "0 calls" in shown(tmp_path)
    Made(tmp_path, 0, 1).communicator("0.1", [0]).call("bcast", 0, 5, sequence=1).write()
    assert "No rank was waited for." in shown(tmp_path)


@pytest.mark.parametrize("ranks", [0, 1, 40])
def test_pictures(tmp_path, ranks, monkeypatch):
    from matplotlib import pyplot as plt

    for rank in range(max(1, ranks)):
        made = Made(tmp_path, rank, max(1, ranks)).communicator("0.1", list(range(max(1, ranks))))
        for number in range(20 if ranks else 0):
            start = 1000 * number + 10 * rank
            made.call(f"operation {number % 9}", start, 1000 * number + 800, sequence=number)
        made.write()
    run, meetings, _ = read(tmp_path)
    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    picture.draw(run, meetings, str(tmp_path / "trace.png"))
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    whole, part = drawn[0].axes
    rows = min(32, max(1, ranks))
    assert len(whole.get_yticks()) == len(part.get_yticks()) == rows
    monkeypatch.undo()
    plt.close(drawn[0])


def test_shares_of_time_are_those_of_the_calls():
    edges = np.linspace(0, 1, 11)
    spans = np.array([(0.05, 0.25), (0.3, 0.4), (0.95, 1.0)])
    covered = picture._covered(spans, edges)
    assert covered == pytest.approx([0.5, 1, 0.5, 1, 0, 0, 0, 0, 0, 0.5])


def trace(*arguments: object) -> click.testing.Result:
    return CliRunner().invoke(command.trace, [str(one) for one in arguments])


def test_the_command_prints_merges_and_draws(tmp_path):
    write_two(tmp_path / "traces")
    output, drawn = tmp_path / "merged.json", tmp_path / "a picture.svg"
    done = trace(tmp_path / "traces", "--output", output, "--plot", drawn)
    assert done.exit_code == 0, done.output
    assert "Others wait most for rank 1" in done.output
    assert len(json.loads(output.read_text())) == 8
    assert "<svg" in drawn.read_text()


def test_wrong_options_of_the_command_are_named(tmp_path, monkeypatch):
    write_two(tmp_path)
    for arguments, said in (
        ((tmp_path / "nowhere",), "can't be read"),
        ((tmp_path, "--run", "x"), "no run 'x'"),
        ((tmp_path, "--output", "/nowhere/x.json"), "can't be written"),
        ((tmp_path, "--plot", tmp_path), "can't be written"),
        ((tmp_path, "--plot", tmp_path / "x.xyz"), "should end in"),
    ):
        done = trace(*arguments)
        assert done.exit_code == 2
        assert said in " ".join(done.output.split())
    monkeypatch.setattr(plots, "find_spec", lambda _: None)
    done = trace(tmp_path, "--plot", "x.png")
    assert done.exit_code == 2
    assert "chainermn-tools[plot]" in done.output

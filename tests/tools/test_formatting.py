"""Bytes, seconds, counts and lists in words; records in tables."""

import pytest
from rich.console import Console

from chainermn_tools import formatting


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (formatting.format_bytes(1), "1 B"),
        (formatting.format_bytes(3 << 29), "1.5 GiB"),
        (formatting.format_bytes(1 << 50), "1024 TiB"),
        (formatting.format_duration(12.34), "12.3 s"),
        (formatting.format_duration(3e-8), "30 ns"),
        (formatting.format_duration(0.0), "0 s"),
        (formatting.format_count(1, "rank"), "1 rank"),
        (formatting.join_first([3, 4, 5], 2), "3, 4, ..."),
        (formatting.printable("a\x1b[2J\n", kept="\n"), "a [2J\n"),
    ],
)
def test_values_are_told_as_people_do(written, expected):
    assert written == expected


@pytest.mark.parametrize(
    ("key", "value", "shown", "head"),
    [
        ("calls", 3, "3", "calls"),
        ("waiting_seconds", 0.25, "250 ms", "waiting"),
        ("at_seconds", 12.5, "12.500000 s", "at"),
        ("bytes", 2048, "2 KiB", "bytes"),
        ("share", 0.5, "50%", "share"),
        ("gb_per_second", 1.234, "1.23", "GB/s"),
        ("examples_per_second", 12345.6, "12346", "examples/s"),
        ("free_bytes", None, "-", "free"),
    ],
)
def test_values_of_records_are_shown_by_their_keys(key, value, shown, head):
    assert formatting.format_value(key, value) == shown
    assert formatting.heading(key) == head


def test_of_many_records_the_first_are_printed():
    console = formatting.make_console()
    records = [{"rank": rank} for rank in range(40)]
    with console.capture() as capture:
        formatting.print_records("Ranks", records, console)
        formatting.print_records("Nothing", [], console)
    lines = [line.strip() for line in capture.get().split("\n")]
    assert lines == ["", "Ranks", "rank", *map(str, range(32)), "and 8 more", ""]


@pytest.mark.parametrize("width", [30, 200])
def test_a_table_fits_a_terminal_and_loses_nothing(width):
    console = Console(width=width, force_terminal=True, color_system=None)
    host = "a-host-with-a-long-name.of.a.cluster.example.org[red]"
    with console.capture() as capture:
        formatting.print_table("T", ["host", "n"], [[host, "7"]], console, ["host"])
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    assert host in "".join(line.split(" ")[0] for line in lines)

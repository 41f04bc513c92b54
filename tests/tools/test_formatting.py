"""Bytes, seconds, counts and lists in words; records in tables."""

import io

from rich.console import Console

from chainermn_tools import formatting


def test_bytes_and_seconds_are_told_in_fitting_units():
    written = [
        formatting.format_bytes(1 << power) for power in (0, 10, 16, 28, 30, 40, 50)
    ]
    assert written == [
        "1 B",
        "1 KiB",
        "64 KiB",
        "256 MiB",
        "1 GiB",
        "1 TiB",
        "1024 TiB",
    ]
    times = [
        formatting.format_duration(seconds)
        for seconds in (12.34, 0.1239, 9.96e-5, 1.2e-6, 3e-8, 0)
    ]
    assert times == ["12.3 s", "124 ms", "100 µs", "1.2 µs", "30 ns", "0"]


def test_counts_and_lists_are_told_as_people_do():
    assert [formatting.format_count(n, "rank") for n in (0, 1, 2)] == [
        "0 ranks",
        "1 rank",
        "2 ranks",
    ]
    assert formatting.join_first([3, 4, 5], 3) == "3, 4, 5"
    assert formatting.join_first([3, 4, 5], 2) == "3, 4, ..."


def test_values_of_records_are_shown_by_their_keys():
    record = {
        **{
            "operation": "bcast",
            "calls": 3,
            "waiting_seconds": 0.25,
            "at_seconds": 12.5,
        },
        **{"bytes": 2048, "share": 0.5, "gb_per_second": 1e-6, "free_bytes": None},
    }
    shown = [formatting.format_value(key, value) for key, value in record.items()]
    assert shown == [
        "bcast",
        "3",
        "250 ms",
        "12.500000 s",
        "2 KiB",
        "50%",
        "<0.001",
        "-",
    ]
    rates = [
        formatting.format_value("examples_per_second", it)
        for it in (None, 1.234, 12345.6)
    ]
    assert rates == ["-", "1.23", "12,346"]
    heads = [formatting.heading(key) for key in record]
    assert heads[2:7] == ["waiting", "at", "bytes", "share", "GB/s"]


def test_of_many_records_the_first_are_printed():
    output = io.StringIO()
    records = [{"rank": rank} for rank in range(40)]
    formatting.print_records("Ranks", records, Console(file=output))
    formatting.print_records("Nothing", [], Console(file=output))
    lines = output.getvalue().split("\n")
    assert lines[:2] == ["", "Ranks"]
    assert [line.strip() for line in lines[2:]] == [
        "rank",
        *map(str, range(32)),
        "and 8 more",
        "",
    ]

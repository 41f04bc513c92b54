"""Bytes, seconds, counts and lists in words."""

from chainermn_tools import formatting


def test_bytes_and_seconds_are_told_in_fitting_units():
    written = [formatting.format_bytes(1 << power) for power in (0, 10, 16, 28, 30, 40, 50)]
    assert written == ["1 B", "1 KiB", "64 KiB", "256 MiB", "1 GiB", "1 TiB", "1024 TiB"]
    times = [
        formatting.format_duration(seconds) for seconds in (12.34, 0.1239, 9.96e-5, 1.2e-6, 3e-8, 0)
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

"""Sizes as users write them."""

import click
import pytest

from chainermn_tools.cli.bench import sizes_to_measure


@pytest.mark.parametrize(
    ("written", "largest"),
    [("1024", 1 << 10), ("64k", 1 << 16), ("16MB", 1 << 24), ("1 GiB", 1 << 30), ("4T", 1 << 42)],
)
def test_sizes_are_read(written, largest):
    assert sizes_to_measure(written)[-1] == largest


def test_the_units_are_powers_of_1024():
    assert sizes_to_measure("2T")[-1] == 1 << 40


@pytest.mark.parametrize("written", ["", "K", "-1K", "1.5M", "1X", "1e6", "9" * 30, "1K;id"])
def test_what_is_no_size_is_refused(written):
    with pytest.raises(click.UsageError, match="is no size"):
        sizes_to_measure(written)


def test_sizes_go_from_1_kib_by_fours():
    assert sizes_to_measure("256M") == [4**power << 10 for power in range(10)]
    assert sizes_to_measure("5000") == [1024, 4096]

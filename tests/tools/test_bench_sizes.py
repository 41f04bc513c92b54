"""Sizes as users write them."""

import pytest

from chainermn_tools.bench import sizes


def test_sizes_are_read():
    written = ("1024", "64k", "16MB", "1 GiB", "2T")
    assert [*map(sizes.parse, written)] == [1024, 1 << 16, 1 << 24, 1 << 30, 2 << 40]


@pytest.mark.parametrize("written", ["", "K", "-1K", "1.5M", "1X", "1e6", "9" * 30, "1K;id"])
def test_what_is_no_size_is_refused(written):
    with pytest.raises(ValueError, match="is no size"):
        sizes.parse(written)


def test_sizes_go_from_1_kib_by_fours():
    assert sizes.up_to(sizes.LARGEST) == [4**power << 10 for power in range(10)]
    assert sizes.up_to(5000) == [1024, 4096]

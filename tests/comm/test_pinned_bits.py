"""Means and sums have the bits that they had, by every name, over every topology and wire dtype."""

from __future__ import annotations

import json

import pytest

from tests.comm import pinned_bits

pytestmark = [pytest.mark.world, pytest.mark.sizes(1, 2, 3, 4)]


def test_means_and_sums_have_the_bits_that_were_written_down(world):
    expected = json.loads(pinned_bits.FILE.read_text())[str(world.size)]
    found = dict(pinned_bits.found(world.size))
    assert found.keys() == expected.keys()
    assert {case for case, digest in found.items() if digest != expected[case]} == set()

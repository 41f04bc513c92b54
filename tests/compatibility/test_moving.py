"""Each entry of the list of differences has its row in docs/moving.md."""

from __future__ import annotations

import pytest

from tests.compatibility import listed
from tests.compatibility.cases import CASES
from tests.compatibility.signatures import tables
from tests.support.scripts import ROOT

PAGE = " ".join((ROOT / "docs" / "moving.md").read_text().split())
LIST = [pytest.param(each, id=each.row) for each in listed.load()]


@pytest.mark.parametrize("entry", LIST)
def test_a_row_tells_it(entry):
    assert entry.why
    assert entry.row in PAGE, "no words of docs/moving.md"


@pytest.mark.parametrize("entry", LIST)
def test_each_pattern_is_of_something(entry):
    named = [*CASES, *tables()]
    nothing = [
        each
        for each in entry.patterns
        if not any(listed.matches(n, [each]) for n in named)
    ]
    assert entry.patterns
    assert not nothing

"""The walks in docs/inside.md name files that exist, and no more of them than they may."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "inside.md"
FILES = [str(path) for path in (ROOT / "packages").glob("*/src/**/*.py")]
NAMES = re.compile(r"`([\w/]+\.py)`")
# A newcomer who follows one of these opens so many files at most.
MOST = {
    "One gradient": 10,
    "One message": 5,
    "A rank raises": 8,
    "A rank never comes": 8,
    "One run of the doctor": 12,
    "One checkpoint": 6,
}


def sections() -> dict[str, str]:
    """Each heading and the text up to the next one."""
    pieces = re.split(r"^#+ (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def test_each_file_that_is_named_is_one_of_the_code():
    named = set(NAMES.findall(PAGE.read_text()))
    found = {name: [path for path in FILES if path.endswith(f"/{name}")] for name in named}
    assert not {name: paths for name, paths in found.items() if len(paths) != 1}


@pytest.mark.parametrize(("heading", "most"), MOST.items())
def test_a_walk_is_short(heading, most):
    assert 1 < len(set(NAMES.findall(sections()[heading]))) <= most


@pytest.mark.parametrize("heading", MOST)
def test_a_walk_never_goes_back(heading):
    """To a file that an earlier step was about; a step begins with its number."""
    steps = re.split(r"^\d+\. ", sections()[heading], flags=re.MULTILINE)[1:]
    named = [set(NAMES.findall(step)) for step in steps]
    before = [set().union(*named[:number]) for number in range(len(named))]
    assert not [both for seen, now in zip(before, named, strict=True) if (both := seen & now)]

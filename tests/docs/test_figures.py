"""Pictures of the manual are used, small, and fetch nothing from elsewhere."""

import re

import pytest

from .blocks import PAGES, ROOT

FIGURES = sorted(
    path
    for path in (ROOT / "docs/figures").iterdir()
    if path.is_file() and path.suffix not in (".py", ".pyc")
)
FETCHED = re.compile(
    r"""(?:href|src)\s*=\s*["'](?!#)|url\(["']?(?!["'#])|@import|@font-face"""
)
BYTES = {".svg": 60_000, ".png": 80_000}


def test_every_picture_is_on_a_page():
    shown = {
        (ROOT / page).parent.joinpath(target).resolve()
        for page in PAGES
        for target in re.findall(r"!\[[^\]]+\]\(([^)#]+)\)", (ROOT / page).read_text())
    }
    assert not [path.name for path in FIGURES if path not in shown]


@pytest.mark.parametrize("path", FIGURES, ids=lambda path: path.name)
def test_a_picture_is_small_and_whole(path):
    assert path.stat().st_size < BYTES[path.suffix]
    if path.suffix == ".svg":
        text = path.read_text()
        assert not FETCHED.findall(text)
        assert str(ROOT) not in text

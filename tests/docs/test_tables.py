"""Tables of the manual can be read aloud: each column has a head."""

import re

from .blocks import PAGES, ROOT

HEAD = re.compile(r"^(\|.*)\n\|[-| :]+\|$", re.M)


def test_each_column_of_a_table_has_a_head():
    """But the first, whose cells are heads of their rows."""
    found = [
        (page, head)
        for page in PAGES
        for head in HEAD.findall((ROOT / page).read_text())
    ]
    assert found
    for page, head in found:
        cells = head.strip().strip("|").split("|")
        assert all(cell.strip() for cell in cells[1:]), f"{page}: {head}"

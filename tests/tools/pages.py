"""What an HTML page holds, as far as tests ask."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """The elements and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, str | None] = {}  # of all elements
        self.sections: dict[str, str] = {}  # texts by the id of their section
        self.text = ""
        self.scripts = ""
        self._section: str | None = None  # that is open
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(attrs)
        if tag == "section":
            self._section = dict(attrs)["id"]

    def handle_endtag(self, tag: str) -> None:
        if tag == "section":
            self._section = None

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts += data
        elif self.cdata_elem is None:
            self.text += data
            if self._section is not None:
                before = self.sections.get(self._section, "")
                self.sections[self._section] = f"{before}{data} "

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script draws, which comes before that script."""
        found: dict[str, Any] = json.JSONDecoder().raw_decode(self.scripts)[0]
        return found

    @property
    def drawn(self) -> str | None:
        """The last rank that the script drew; None if the script failed or drew none."""
        assert "data-error" not in self.attributes
        assert self.attributes["data-drawn"] == "yes"
        return self.attributes.get("data-rank")

"""What an HTML page holds, as far as tests ask."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "img", "br", "input"}


class Page(HTMLParser):
    """The elements and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.sections: dict[str, str] = {}  # texts by the id of their section
        self.scripts: list[str] = []
        self.text = ""
        self.open: list[tuple[str, str]] = []  # tags and their ids
        self.feed(text)
        self.close()
        assert self.open == [], "each element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id") or ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] == "script":
            self.scripts[-1] += data
        elif "style" not in {tag for tag, _ in self.open}:
            self.text += data
            for tag, name in self.open:
                if tag == "section":
                    self.sections[name] = self.sections.get(name, "") + data + " "

    @property
    def data(self) -> dict[str, Any]:
        """What the page's script draws."""
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found

    @property
    def root(self) -> dict[str, str | None]:
        """The attributes that begin with ``data-``."""
        return {
            name: value for name, value in self.attributes if name.startswith("data-")
        }

"""Turns docstrings into Markdown: roles, `::` and a simple table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

API = Path(__file__).parent / "api"
ROLE = re.compile(r":(\w+):`~?([^`]+)`")
RULE = re.compile(r" *={3,}(  *={3,})+ *")
# Where each documented name is, so that a role becomes a link.
PLACES = {
    path.rpartition(".")[2]: path
    for page in API.glob("*.md")
    for path in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
}


class Markdown(griffe.Extension):
    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    text = ROLE.sub(_link, text)
    text = re.sub(r"(?<=\S)::$", ":", text, flags=re.MULTILINE)
    return _tables(text)


def _link(role: re.Match[str]) -> str:
    kind, path = role.groups()
    name = path.rpartition(".")[2]
    place = None if kind == "meth" or path.startswith("chainer.") else PLACES.get(name)
    return f"[`{name}`][{place}]" if place else f"`{name}`"


def _tables(text: str) -> str:
    lines = text.split("\n")
    rules = [i for i, line in enumerate(lines) if RULE.fullmatch(line)]
    for top, bottom in reversed(list(zip(rules[::2], rules[1::2], strict=False))):
        second = lines[top].rindex(" ") + 1
        rows: list[list[str]] = []
        for line in lines[top + 1 : bottom]:
            first, rest = line[:second].strip(), line[second:].strip()
            if first:
                rows.append([first, rest])
            else:
                rows[-1][1] += " " + rest
        lines[top : bottom + 1] = [
            "| name | meaning |",
            "|---|---|",
            *(f"| {a} | {b} |" for a, b in rows),
        ]
    return "\n".join(lines)

"""Writes the page: tables and notes as text, time lines and curves as data for its script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from chainermn_tools import trace
from chainermn_tools.environment import sections
from chainermn_tools.formatting import MOST_RECORDS, format_value, heading, printable
from chainermn_tools.report.curves import curves
from chainermn_tools.report.inputs import Inputs


def write(file: str, name: str, found: Inputs) -> None:
    """Write what was found into a file, under a title; raise OSError if writing fails."""
    notes = list(found.notes)
    data: dict[str, Any] = {"timeline": found.timeline, "summary": found.summary}
    if found.log is not None:
        data["curves"], more = curves(found.log)
        notes += more
    if found.summary is not None:
        notes += found.summary["warnings"]
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # The text stands in a <script>, which only "<" could end, or turn into a comment.
    text = text.replace("<", "\\u003c")
    page = files(__package__).joinpath("template.html").read_text("utf-8")
    page = page.replace("<!--data-->", text)
    before, between, after = page.split("<!--here-->")
    title = f"<title>{_text(name)} · ChainerMN</title>"
    body = _body(name, found, notes)
    page = before + title + between + body + after
    Path(file).write_text(page, "utf-8", errors="replace")


def _body(name: str, found: Inputs, notes: Sequence[str]) -> str:
    made = datetime.now().astimezone().isoformat(" ", "minutes")
    by = f"Made by chainermn-tools {version('chainermn-tools')} on {made}"
    parts = [f"<header><h1>{_text(name)}</h1><p>{by}</p></header><main>"]
    if found.summary:
        parts.append(f"<p class=verdict>{_text(found.summary['verdict'])}</p>")
    if notes:
        lines = "".join(f"<li>{_text(note)}</li>" for note in notes)
        summary = f"<summary>Notes</summary><ul>{lines}</ul>"
        parts.append(f"<details class=notes open>{summary}</details>")
    if found.log is not None:
        parts.append(_section("curves", "Learning curves"))
    if found.summary and found.timeline:
        about = f"{trace.title(found.summary)}. {found.timeline['shown']}"
        parts.append(_section("timeline", "Time lines", f"<p>{_text(about)}</p>"))
        for key, title in trace.TABLES.items():
            if records := found.summary[key]:
                parts.append(_section(key, title, _table(records)))
    if found.environment is not None:
        content = f"<p>{_text(found.environment_of)}</p>"
        for title, rows in sections(found.environment):
            table = ""
            for key, value in rows:
                table += f"<tr>{_cell('th', key, key)}{_cell('td', value, value)}</tr>"
            content += f"<details><summary>{_text(title)}</summary><table>{table}</table></details>"
        parts.append(_section("environment", "Environment", content))
    parts.append("</main>")
    return "".join(parts)


def _section(name: str, title: str, content: str = "") -> str:
    return f"<section id={name}><h2>{_text(title)}</h2>{content}</section>"


def _table(records: Sequence[dict[str, Any]]) -> str:
    head = ""
    for key, value in records[0].items():
        head += _cell("th", heading(key), value)
    body = ""
    for record in records[:MOST_RECORDS]:
        body += "<tr>"
        for key, value in record.items():
            body += _cell("td", format_value(key, value), value)
        body += "</tr>"
    table = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f"<div class=wide><table>{table}</table></div>"


def _cell(tag: str, text: str, value: object) -> str:
    """Return a cell with the text, aligned as values of this kind are."""
    kind = " class=number"
    if isinstance(value, str):
        kind = ""
    return f"<{tag}{kind}>{_text(text)}</{tag}>"


def _text(text: object) -> str:
    return escape(printable(str(text)))

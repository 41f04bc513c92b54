"""Writes the page: tables and notes as text in it, time lines and curves as data for its script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from chainermn_tools import trace
from chainermn_tools.environment import sections
from chainermn_tools.formatting import MOST_RECORDS, format_value, heading, printable
from chainermn_tools.report.curves import curves, is_number
from chainermn_tools.report.inputs import Inputs

MOST_CARDS = 8  # of the last entry of a log


def write(file: str, name: str, found: Inputs) -> None:
    """Write what was found into a file, under a name; raise OSError where that can't be done."""
    notes = list(found.notes)
    data: dict[str, Any] = {"timeline": found.timeline, "summary": found.summary}
    if found.log is not None:
        data["curves"], more = curves(found.log)
        notes += more
    if found.summary is not None:
        notes += found.summary["warnings"]
    # In a script's text only "<" could end it, or begin a comment.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace(
        "<", "\\u003c"
    )
    page = files(__package__).joinpath("template.html").read_text("utf-8")
    before, between, after = page.replace("<!--data-->", text).split("<!--here-->")
    title, body = (
        f"<title>{_text(name)} · ChainerMN</title>",
        "".join(_body(name, found, notes)),
    )
    Path(file).write_text(
        f"{before}{title}{between}{body}{after}", "utf-8", errors="replace"
    )


def _body(name: str, found: Inputs, notes: Sequence[str]) -> Iterator[str]:
    made = datetime.now().astimezone().isoformat(" ", "minutes")
    yield f"<header><h1>{_text(name)}</h1><p>Made by chainermn-tools {version('chainermn-tools')} "
    yield f"on {made}</p></header><main>"
    cards = (
        f"<div><dt>{_text(a)}</dt><dd>{_text(b)}</dd></div>" for a, b in _cards(found)
    )
    yield f"<dl class=cards>{''.join(cards)}</dl>"
    if found.summary:
        yield f"<p class=verdict>{_text(found.summary['verdict'])}</p>"
    if notes:
        lines = "".join(f"<li>{_text(note)}</li>" for note in notes)
        yield f"<details class=notes open><summary>Notes</summary><ul>{lines}</ul></details>"
    if found.log is not None:
        yield "<section id=curves><h2>Learning curves</h2></section>"
    if found.summary and found.timeline:
        about = _text(f"{trace.title(found.summary)}. {found.timeline['shown']}")
        yield f"<section id=timeline><h2>Time lines</h2><p>{about}</p></section>"
        for key, title in trace.TABLES.items():
            if records := found.summary[key]:
                yield f"<section id={key}><h2>{_text(title)}</h2>{_table(records)}</section>"
    if found.environment is not None:
        yield f"<section id=environment><h2>Environment</h2><p>{_text(found.environment_of)}</p>"
        for title, rows in sections(found.environment):
            lines = "".join(
                f"<tr><th>{_text(a)}</th><td>{_text(b)}</td></tr>" for a, b in rows
            )
            yield f"<details><summary>{_text(title)}</summary><table>{lines}</table></details>"
        yield "</section>"
    yield "</main>"


def _cards(found: Inputs) -> Iterator[tuple[str, object]]:
    last = [item for item in (found.log or [{}])[-1].items() if is_number(item[1])]
    yield from (
        (name, f"{value:.4g}" if value % 1 else int(value))
        for name, value in last[:MOST_CARDS]
    )
    if found.summary:
        ranks, length = found.summary["ranks"], found.summary["seconds"]
        yield "ranks", len(ranks)
        yield "hosts", len(found.summary["hosts"])
        yield "traced", format_value("seconds", length)
        waiting = sum(row["waiting_seconds"] for row in ranks)
        yield "waiting for ranks", f"{waiting / (length * len(ranks) or 1):.0%}"


def _table(records: Sequence[dict[str, Any]]) -> str:
    keys = list(records[0])
    kinds = {
        key: " class=number" * (not isinstance(records[0][key], str)) for key in keys
    }
    head = "".join(f"<th{kinds[key]}>{_text(heading(key))}</th>" for key in keys)
    rows = (
        "".join(
            f"<td{kinds[key]}>{_text(format_value(key, row[key]))}</td>" for key in keys
        )
        for row in records[:MOST_RECORDS]
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<div class=wide><table><thead>{head}</thead><tbody>{body}</tbody></table></div>"


def _text(text: object) -> str:
    return escape(printable(str(text)))

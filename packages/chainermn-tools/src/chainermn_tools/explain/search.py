"""Finds known failures in a log, block by block, in little memory whatever the log's length."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from chainermn_tools.explain.error_rules import ErrorRule, Kind, load_rules
from chainermn_tools.explain.verdict import LITERALS, VerdictFinder
from chainermn_tools.formatting import printable

BLOCK_BYTES = 1 << 20
# A "line" longer than a block (binary data) is cut; the pieces overlap by this much, so
# that a message at a cut is still whole in one of them.
OVERLAP_BYTES = 4096
# Before and after a literal; the longest message that is known has 212.
AROUND_BYTES = 1024
# Of the line that is shown; the rest of a longer one is left out.
SHOWN_CHARACTERS = 300
NEWLINE = re.compile(rb"\r\n|\n|\r")
COLOUR = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
ORDER = list(Kind)


@dataclass
class Match:
    """A known failure that is in a log."""

    rule: ErrorRule
    # The first that says so, from 1; progress bars' carriage returns don't count.
    line: int
    text: str  # that line, without control characters, shortened
    times: int  # number of lines that say so


def search(
    log: BinaryIO,
    rules: Sequence[ErrorRule] | None = None,
    finder: VerdictFinder | None = None,
) -> list[Match]:
    """Find the failures of some rules, or of all, in a log, which may hold anything.

    Return each failure once: what says most first, and what only says that something
    else failed last; among equals in the log's order. Where a ``finder`` finds who
    failed first, the launcher's echoes of that are left out. Raise OSError if the log
    can't be read.
    """
    found: dict[str, Match] = {}
    # Of rules that take several lines, which say what.
    alike: Counter[tuple[str, str]] = Counter()
    last = 0  # line that isn't empty
    for first_line, fresh, block in _blocks(log):
        last = first_line + block.rstrip().count(b"\n") if block.strip() else last
        for start, end in _lines_with(LITERALS, block, fresh) if finder else ():
            line, before = (
                first_line + block.count(b"\n", 0, start),
                block[:start][-AROUND_BYTES:],
            )
            assert finder
            finder.take(
                line, block[start:end].decode(errors="replace"), before, block[start:]
            )
        for rule in load_rules() if rules is None else rules:
            for start, end in _lines_with(rule.literals, block, fresh):
                text = block[start:end].decode(errors="replace")
                said = rule.pattern.search(text) if rule.pattern else None
                if rule.pattern and not said:
                    continue
                if rule.times > 1:
                    alike[rule.name, said.group() if said else ""] += 1
                if rule.name in found:
                    found[rule.name].times += 1
                else:
                    line = first_line + block.count(b"\n", 0, start)
                    found[rule.name] = Match(rule, line, _shown(text, rule.literals), 1)
    most = {name: times for (name, _), times in reversed(alike.most_common())}
    seen = [
        one for one in found.values() if most.get(one.rule.name, 1) >= one.rule.times
    ]
    if finder:
        causes = {
            one.rule.component for one in seen if one.rule.kind is Kind.ROOT_CAUSE
        }
        is_echoed = any(one.rule.kind is Kind.SECONDARY for one in seen)
        finder.end(
            last,
            is_echoed,
            by_scheduler=bool(causes & {"the scheduler", "Slurm", "Linux"}),
        )
    if finder and (verdict := finder.verdict()):
        seen = [one for one in seen if not one.rule.is_echo_of(verdict)]
    return sorted(seen, key=lambda one: (ORDER.index(one.rule.kind), one.line))


def root_cause(output: bytes) -> Match | None:
    """Return the failure that went first in what a program printed; None if none is known."""
    telling = (Kind.ROOT_CAUSE, Kind.AMBIGUOUS)
    return next(
        (one for one in search(io.BytesIO(output)) if one.rule.kind in telling), None
    )


def _lines_with(
    literals: Sequence[str], block: bytes, fresh: int
) -> Iterator[tuple[int, int]]:
    """Return where the lines with one of these texts begin and end, but for those before ``fresh``.

    Of a long line, what is around the text: some lines would keep a pattern busy for
    minutes.
    """
    wanted = [literal.encode() for literal in literals]
    positions = [block.find(literal) for literal in wanted]
    start, end = 0, -1  # of the line, which may have many of the texts
    while any(position >= 0 for position in positions):
        at = min(position for position in positions if position >= 0)
        if at > end:
            before = max(0, end)
            start = (
                max(block.rfind(b"\n", before, at), block.rfind(b"\r", before, at)) + 1
            )
            ending = NEWLINE.search(block, at)
            end = ending.start() if ending else len(block)
        length = len(wanted[positions.index(at)])
        shown_end = min(end, at + AROUND_BYTES)
        if at + length > fresh:
            yield max(start, at - AROUND_BYTES), shown_end
        positions = [
            block.find(literal, shown_end) if 0 <= position <= shown_end else position
            for literal, position in zip(wanted, positions, strict=True)
        ]


def _blocks(log: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Yield the log in blocks of whole lines, without terminals' colours.

    With each go the number of its first line, and how many of its bytes were in the one
    before.
    """
    line, fresh, rest = 1, 0, b""
    while piece := log.read(BLOCK_BYTES):
        block = COLOUR.sub(b"", rest + piece)
        cut = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
        if cut:
            whole, rest = block[:cut], block[cut:]
        elif len(block) < BLOCK_BYTES:
            rest = block  # so far less than a line
            continue
        else:
            whole, rest = block, block[-OVERLAP_BYTES:]
        yield line, fresh, whole
        line += whole.count(b"\n")
        fresh = 0 if cut else len(rest)
    yield line, fresh, rest


def _shown(text: str, literals: Sequence[str]) -> str:
    """Return the line, printable and no longer than is good to read, with the literal in it."""
    text = printable(text).strip()
    at = next((text.find(literal) for literal in literals if literal in text), 0)
    start = max(0, at - SHOWN_CHARACTERS // 3) if len(text) > SHOWN_CHARACTERS else 0
    shown = text[start : start + SHOWN_CHARACTERS]
    return f"{'...' if start else ''}{shown}{'...' if start + len(shown) < len(text) else ''}"

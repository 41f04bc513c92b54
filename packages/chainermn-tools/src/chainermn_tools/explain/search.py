"""Searches a log for the job's verdict and for known errors, in little memory."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import BinaryIO, NamedTuple

from chainermn_tools.explain.error_rules import ErrorRule, Kind, load_rules
from chainermn_tools.explain.failed_rank import Verdict, VerdictFinder
from chainermn_tools.formatting import printable

# A longer "line", of binary data, is read in pieces of this length, so that no pattern
# takes long. A message that the end of a piece cuts isn't found.
LINE_CHARACTERS = 4096
# Rules are first compared with this number of lines together, because most lines match
# none.
LINES_TOGETHER = 100
# The most characters of a line that are shown, and how many of them before the message.
SHOWN_CHARACTERS = 300
SHOWN_BEFORE = 100
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
EMPTY = "The log is empty. Redirect both streams: `mpiexec ... > job.log 2>&1`."
NO_TRACEBACK = "No known error found; the log has no whole traceback."
LAST_TRACEBACK = "The last traceback, after which the log goes on: "
NO_TEXT = "No known error found; this is no plain text."
# Characters that no text has, and bytes that couldn't be decoded.
BINARY = re.compile("[\0\ufffd]")
# The placeholder for a host's name in the advice of rules.
HOST = "host1"
# Kinds of errors that say why a job failed.
TELLING = (Kind.ROOT_CAUSE, Kind.AMBIGUOUS, Kind.SIGNAL)
ORDER = list(Kind)


class Line(NamedTuple):
    """A line of a log."""

    number: int  # from 1; the carriage returns of progress bars don't count
    text: str  # without the colours of terminals


@dataclass
class Match:
    """A known error that is in a log."""

    rule: ErrorRule
    line: int  # the number of the first line with this error
    text: str  # that line, without control characters, shortened
    host: str = HOST  # the host that the line names
    times: int = 0  # the number of lines with this error
    is_in_tracebacks: bool = True  # whether all these lines are in tracebacks

    @property
    def fix(self) -> list[str]:
        """The remedies, for the host that the log names."""
        return [fix.replace(HOST, self.host) for fix in self.rule.fix]


@dataclass
class Findings:
    """What a log says of its job."""

    verdict: Verdict | None
    matches: list[Match]  # the most telling first; otherwise in the log's order
    nothing: str  # the text if nothing was found


def search(log: BinaryIO, rules: Sequence[ErrorRule] | None = None) -> Findings:
    """Search a log, which may contain anything, for the errors of some rules, or of all rules.

    Each error is returned once. If the log has a verdict, messages that only follow
    from the verdict are left out, and so are errors that were caught. Raise OSError if
    the log can't be read.
    """
    if rules is None:
        rules = load_rules()
    finder = VerdictFinder()
    matches: dict[str, Match] = {}
    nothing = EMPTY
    lines = _lines(log)
    while some := list(islice(lines, LINES_TOGETHER)):
        together = "\n".join(line.text for line in some)
        if BINARY.search(together):
            nothing = NO_TEXT
        elif nothing == EMPTY:
            nothing = NO_TRACEBACK
        possible = [rule for rule in rules if rule.is_possible(together)]
        for line in some:
            in_traceback = finder.take(*line)
            for rule in possible:
                _count(rule, line, matches, in_traceback)

    verdict = finder.verdict
    found = [match for match in matches.values() if not _is_echo(match.rule, verdict)]
    if not verdict and not finder.ended:  # the job went on after its tracebacks
        found = [match for match in found if not match.is_in_tracebacks]
    found.sort(key=lambda match: (ORDER.index(match.rule.kind), match.line))
    for error in finder.tracebacks:
        nothing = LAST_TRACEBACK + error
    return Findings(verdict, found, nothing)


def root_cause(output: bytes) -> Match | None:
    """Return the most telling known error in a program's output; None if there is none."""
    for match in search(io.BytesIO(output)).matches:
        if match.rule.kind in TELLING:
            return match
    return None


def _lines(log: BinaryIO) -> Iterator[Line]:
    raw = io.BufferedReader(log)  # type: ignore[type-var]
    encoding = "utf-8"
    if raw.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"  # the encoding of Windows' PowerShell
    elif re.match(rb"[^\0]\0[^\0]\0", raw.peek(4)):
        encoding = "utf-16-le"
    text = io.TextIOWrapper(raw, encoding, errors="replace", newline="")
    number = 1
    while piece := text.readline(LINE_CHARACTERS):
        yield Line(number, COLOUR.sub("", piece).rstrip("\r\n"))
        if piece.endswith("\n"):
            number += 1
    text.detach()
    raw.detach()  # so that neither closes the log


def _count(
    rule: ErrorRule, line: Line, matches: dict[str, Match], in_traceback: bool
) -> None:
    """Add a line to the rule's match if it means this error."""
    said = rule.find(line.text)
    if said is None:
        return
    host = said.groupdict().get("host") or HOST
    first = Match(rule, line.number, _shown(line.text, said.start()), host)
    match = matches.setdefault(rule.name, first)
    match.times += 1
    match.is_in_tracebacks &= in_traceback
    if match.host == HOST:
        match.host = host


def _is_echo(rule: ErrorRule, verdict: Verdict | None) -> bool:
    """Return whether an error says less than the verdict, and follows from it."""
    if verdict is None:
        return False
    if rule.kind is Kind.SIGNAL:  # MPICH's mpiexec kills the other ranks
        return not verdict.is_by_signal or verdict.how.startswith("ended by signal 9 ")
    return rule.kind is Kind.SECONDARY


def _shown(text: str, start: int) -> str:
    """Return a short, printable part of the line, with the text at ``start``."""
    text = printable(text).strip()
    if len(text) > SHOWN_CHARACTERS:
        begin = max(0, start - SHOWN_BEFORE)
        text = f"...{text[begin : begin + SHOWN_CHARACTERS]}..."
    return text

"""The code blocks of Markdown pages: where they stand, and what is said of them.

A block is fenced or indented by four spaces; an indented one is for the shell. What a
comment right before it says holds for it:

    <!-- not run: needs Slurm -->        no test runs it, and why
    <!-- run by: tests/x/test_y.py -->   another test runs it, or what it starts
    <!-- of: pyproject.toml -->          it is a part of that file
    <!-- ranks: 2 -->                    a block of Python that runs on two ranks
    <!-- status: 0 3 -->                 commands that may end with either

The blocks of Python on a page are one script, in which each begins where the one before
ended. One with a title, such as ``title="train.py"``, is that file instead, and a diff
changes it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "README.md",
        "docs/**/*.md",
        "packages/*/README.md",
        "examples/*/README.md",
    )
    for path in ROOT.glob(pattern)
)
NOTES = ("not run", "run by", "of", "ranks", "status")
FENCE = re.compile(r"( *)(```+)\s*(\w*)\s*(.*)")
COMMENT = re.compile(r"\s*<!--\s*(.*?)\s*-->\s*")


@dataclass(frozen=True)
class Block:
    """A block of code."""

    page: str  # its path below the repository
    line: int  # of the first line of code
    language: str  # as the fence says; `shell` where the block is indented
    title: str  # name of a file, or ""
    text: str  # without indentation that all of it has
    # What the comment right before it says, by the first words of it.
    note: dict[str, str]

    @property
    def ranks(self) -> int:
        return int(self.note.get("ranks", 1))

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in self.note.get("status", "0").split()]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    lines = (ROOT / page).read_text().split("\n")
    found: list[Block] = []
    note: dict[str, str] = {}
    i = 0
    in_list = False
    while i < len(lines):
        fence = FENCE.fullmatch(lines[i])
        comment = COMMENT.fullmatch(lines[i])
        start = i
        language = ""
        title = ""
        if fence:
            indent, ticks, language, rest = fence.groups()
            named = re.search(r'title="([^"]+)"', rest)
            title = ""
            if named:
                title = named[1]
            start = i + 1
            i = next(j for j in range(start, len(lines)) if lines[j].strip() == ticks)
            code = [line.removeprefix(indent) for line in lines[start:i]]
        elif (
            lines[i].startswith("    ")
            and not in_list
            and (i == 0 or not lines[i - 1].strip())
        ):
            language = "shell"
            while i < len(lines) and (
                lines[i].startswith("    ") or not lines[i].strip()
            ):
                i += 1
            code = [line[4:] for line in lines[start:i]]
            i -= 1
        elif comment:
            kind, _, text = comment[1].partition(": ")
            note = {}
            if kind in NOTES:
                note = {kind: text}
        elif lines[i].strip():
            note = {}
            # What is indented below an entry of a list is its own; so is an API page's
            # option.
            goes_on = in_list and lines[i].startswith(" ")
            in_list = goes_on or bool(re.match(r"\s*([-*]|\d+\.|:::) ", lines[i]))
        if language or fence:
            text = "\n".join(code).strip("\n") + "\n"
            found.append(Block(page, start + 1, language, title, text, note))
            note = {}
        i += 1
    return found

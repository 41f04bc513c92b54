"""Sentences of pages, help texts and messages are short, and without what readers stumble over."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from .blocks import PAGES, ROOT

# VOCABULARY's style: what to avoid, and what to do instead.
STYLE = {
    r"of which": "begin a sentence with the thing itself",
    r"so (many|much|long|few)": "name the number, or what it depends on",
    r"told": "say what is printed, sent or raised",
    r"such an? one": "name it",
    r"let pile up": "say what is not done, and by whom",
}
MOST_WORDS = 35  # in a sentence
# In all; decisions apart.
BUDGETS = {"docs/decisions/": 8_000, "docs/": 18_000}
CODE = sorted(ROOT.glob("packages/*/src/**/*.py"))
RULES = sorted(ROOT.glob("packages/*/src/**/rules/*.toml"))  # of `chainermn explain`


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """The sentences of a page with their lines; code in them is one word."""
    for block in MarkdownIt("commonmark").enable("table").parse(text):
        if block.type == "inline":
            words = (
                "x" if part.type == "code_inline" else part.content or " "
                for part in block.children or []
            )
            for sentence in re.split(r"(?<=[.!?:;])\s", "".join(words)):
                yield (block.map or [0])[0] + 1, sentence


def texts(file: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module, docstrings and messages alike, and its comments."""
    source = file.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def faults(where: str, texts: Iterator[tuple[int, str]]) -> list[str]:
    return [
        f"{where}:{line}: {found[0]!r}: {advice}"
        for line, text in texts
        for avoided, advice in STYLE.items()
        if (found := re.search(rf"\b{avoided}\b", text, re.I))
    ]


@pytest.mark.parametrize(
    "page", [*PAGES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
)
def test_a_page_is_plain(page):
    found = list(sentences((ROOT / page).read_text()))
    long = [(line, text) for line, text in found if len(text.split()) > MOST_WORDS]
    assert faults(page, iter(found)) == []
    assert [f"{page}:{line}: split it: {text}" for line, text in long] == []


def test_messages_help_docstrings_and_comments_are_plain():
    assert [each for file in CODE for each in faults(file.name, texts(file))] == []


@pytest.mark.parametrize("rules", RULES, ids=lambda path: path.name)
def test_explanations_are_plain(rules):
    lines = enumerate(rules.read_text().splitlines(), 1)
    # What programs print is theirs.
    own = iter([each for each in lines if re.match("meaning|source", each[1])])
    assert faults(rules.name, own) == []


def test_each_column_of_a_table_has_a_head():
    heads = re.compile(r"^(\|.*)\n\|[-| :]+\|$", re.M)
    assert [
        f"{page}: {head}"
        for page in PAGES
        for head in heads.findall((ROOT / page).read_text())
        if not all(cell.strip() for cell in head.strip().strip("|").split("|")[1:])
    ] == []


@pytest.mark.parametrize("folder", BUDGETS)
def test_the_manual_is_short(folder):
    within = [page for page in PAGES if page.startswith(folder)]
    if folder == "docs/":
        within = [page for page in within if not page.startswith("docs/decisions/")]
    assert (
        sum(len((ROOT / page).read_text().split()) for page in within)
        <= BUDGETS[folder]
    )


@pytest.mark.parametrize(
    "text", ["It has two parts, of which one is ours.", " ".join(["word"] * 50)]
)
def test_a_fault_is_found(text):
    found = list(sentences(f"# A page\n\n- {text}\n"))
    assert faults("page", iter(found)) or any(
        len(each.split()) > MOST_WORDS for _, each in found
    )

"""Cases call all that Chainer 7's `chainermn` has, but for what is listed here with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compatibility import cases, listed
from tests.compatibility.signatures import TABLE

FILES = sorted(Path(cases.__file__).parent.glob("*.py"))
# Where a module's names are called; those of others in any file.
PLACES = {
    "communicators": ["communicators", "configurations", "modules", "objects"],
    "datasets": ["datasets"],
    "extensions": ["checkpoints", "evaluators", "extensions"],
    "functions": ["functions", "links"],
    "iterators": ["iterators"],
    "links": ["links"],
}
DEFINED = "cases define it, and its class calls it"
UNCALLED = {
    "chainermn.extensions.multi_node_evaluator.GenericMultiNodeEvaluator.aggregate": DEFINED,
    "chainermn.extensions.multi_node_evaluator.GenericMultiNodeEvaluator.calc_local": DEFINED,
}


def names() -> list[str]:
    """Paths of functions, classes, methods and attributes, but for those that are left out."""
    rows = ["classes behind `chainermn.functions`", "`compute_summary`"]
    gone = [
        each
        for entry in listed.load()
        if entry.row in rows
        for each in entry.signatures
    ]
    kinds = {
        line.partition("(")[0]: "(" in line for line in TABLE.read_text().splitlines()
    }
    called = [
        path for path in kinds if kinds[path] or kinds.get(path.rpartition(".")[0])
    ]
    return [path for path in called if not listed.matches(path, gone)]


def words(file: Path) -> Iterator[str]:
    """Attributes, and texts such as `getattr` takes."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


WORDS = {file.stem: set(words(file)) for file in FILES}


@pytest.mark.parametrize("path", names())
def test_a_case_calls_it(path):
    module, name = path.split(".")[1], path.rpartition(".")[2]
    found = [file for file in PLACES.get(module, WORDS) if name in WORDS[file]]
    assert bool(found) != (path in UNCALLED)


def test_what_is_uncalled_is_there():
    assert UNCALLED.keys() <= set(names())

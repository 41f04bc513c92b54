"""Faults that may be planted in a package: changes of one node, on lines that tests execute."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cosmic_ray.ast import get_ast  # type: ignore[import-not-found]
from cosmic_ray.mutating import mutate_code  # type: ignore[import-not-found]
from cosmic_ray.plugins import get_operator, operator_names  # type: ignore[import-not-found]

from tests.mutation.executions import ROOT, Executions


@dataclass(frozen=True)
class Fault:
    """A file of a package with one node changed."""

    path: Path
    code: str  # the whole file as it is
    changed: str  # the whole file with the fault
    line: int  # the first that differs
    was: str
    now: str
    tests: tuple[str, ...]  # the executions that reach it, as `Executions` names them


def draw(package: str, seed: int, executions: Executions) -> Iterator[Fault]:
    """Faults of a package in an order that the seed decides."""
    folder = ROOT / "packages" / f"chainermn-{package}" / "src"
    return draw_in(sorted(folder.rglob("*.py")), f"{seed} {package}", executions)


def draw_in(paths: list[Path], seed: str, executions: Executions) -> Iterator[Fault]:
    """Faults of these files, of which some test executes a line."""
    executed = [path for path in paths if executions.of_file(path)]
    found = [(path, *each) for path in executed for each in _mutations(path)]
    random.Random(seed).shuffle(found)
    drawn = set()
    for path, operator, number in found:
        fault = _fault(path, operator, number, executions)
        if fault is not None and fault.changed not in drawn:
            drawn.add(fault.changed)
            yield fault


def _fault(path: Path, operator, number: int, executions: Executions) -> Fault | None:
    """The fault, or None if it changes nothing that is run, or no test executes it."""
    code = path.read_text()
    # cosmic-ray fails at `except a.b`, and takes the stars of `{**a}` for an operator.
    try:
        changed = mutate_code(code, operator, number)
        if changed is None or _run(changed) == _run(code):
            return None
    except (AttributeError, SyntaxError):
        return None
    line, was, now = _difference(code, changed)
    if is_at_import(code, line):
        tests = executions.of_file(path)
    else:
        tests = executions.of_lines(path, statement_lines(code, line))
    if not tests:
        return None
    return Fault(path, code, changed, line, was, now, tuple(sorted(tests)))


def _mutations(path: Path) -> list[tuple[Any, int]]:
    """Each change that an operator of cosmic-ray makes somewhere, as `mutate_code` takes it."""
    nodes = [get_ast(path.read_text())]
    for node in nodes:  # which grows
        nodes += getattr(node, "children", ())
    found = []
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():  # it must be told what to replace
            continue
        count = sum(len(list(operator().mutation_positions(node))) for node in nodes)
        found += [(operator(), number) for number in range(count)]
    return found


def _run(code: str) -> str:
    """The code as a tree without annotations, which are never evaluated here."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def _difference(before: str, after: str) -> tuple[int, str, str]:
    """The first line that differs: its number, what it was, and what it is."""
    lines = zip_longest(before.splitlines(), after.splitlines(), fillvalue="")
    for number, (was, now) in enumerate(lines, 1):
        if was != now:
            return number, was.strip(), now.strip()
    raise ValueError("nothing differs")


def is_at_import(code: str, line: int) -> bool:
    """Whether the line is outside of all functions: it runs once, whatever test imports it."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    return not any(
        node.body[0].lineno <= line <= (node.end_lineno or line)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, functions) and isinstance(node.body, list)
    )


def statement_lines(code: str, line: int) -> range:
    """The lines of the statement that has this line; of `if` and the like, those of its head."""
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.stmt):
            continue
        end = node.end_lineno or node.lineno
        body = getattr(node, "body", None)
        if body:
            end = max(node.lineno, body[0].lineno - 1)
        if node.lineno <= line <= end:  # inner ones come later
            found = range(node.lineno, end + 1)
    return found

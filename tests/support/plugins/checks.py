"""Counts what a test checks while it runs, so that one that checks nothing fails.

Each `assert` of the test's call counts, passed or not, and so does the end of each
`pytest.raises` and each call of NumPy's functions below. A world test must check
something on some rank.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest
from _pytest.assertion import rewrite
from _pytest.raises import RaisesExc, RaisesGroup
from _pytest.recwarn import WarningsChecker

_count = 0
COUNT_ONE = "__import__('sys').modules['tests.support.plugins.checks'].add()"


def count() -> int:
    """How much the running test has checked so far."""
    return _count


def add():
    """Count a check."""
    global _count
    _count += 1


def install():
    """Count checks from now on; call it before any test module is imported."""
    for checker in (RaisesExc, RaisesGroup, WarningsChecker):
        checker.__exit__ = _counted(checker.__exit__)  # type: ignore[method-assign]
    for name in ("array_equal", "allclose", "array_less", "equal", "array_max_ulp"):
        setattr(
            np.testing,
            f"assert_{name}",
            _counted(getattr(np.testing, f"assert_{name}")),
        )
    # pytest's hook for passed assertions describes each, which takes a fifth of a
    # world's time, and keeps the test's locals alive. Modules rewritten like this are
    # cached under another name.
    rewrite.AssertionRewriter.visit_Assert = _counting(
        rewrite.AssertionRewriter.visit_Assert
    )
    rewrite.PYC_TAIL = f"-counted{rewrite.PYC_TAIL}"


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args, **kwargs):
        add()
        return function(*args, **kwargs)

    return call


def _counting(visit: Callable[[Any, ast.Assert], list[ast.stmt]]):
    def visit_assert(self, node: ast.Assert) -> list[ast.stmt]:
        # What a double takes for granted.
        if str(self.module_path).endswith("_double.py"):
            return visit(self, node)
        statement = ast.parse(COUNT_ONE).body[0]
        for each in ast.walk(statement):
            ast.copy_location(each, node)
        return [statement, *visit(self, node)]

    return visit_assert


def require(report: pytest.TestReport, checked: int):
    """Turn a passed test that checked nothing into a failed one."""
    if report.when == "call" and report.passed and not checked:
        report.outcome = "failed"
        report.longrepr = (
            "nothing was checked: no assert, pytest.raises or the like was reached"
        )


class Plugin:
    """Counts afresh for each test; asks for a check where no world of ranks does."""

    def __init__(self, world: bool):
        self._world = world

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self):
        global _count
        _count = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self,
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if not self._world:
            require(report, _count)
        return report

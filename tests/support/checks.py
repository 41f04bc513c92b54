"""Counts what a test checks while it runs, so that one that checks nothing fails.

An `assert` counts (by pytest's hook for those that pass), and so does each call of the functions
below that raise where something is not as expected. A world test must check something on some rank.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

_count = 0


def count() -> int:
    """How much the running test has checked so far."""
    return _count


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _count
        _count += 1
        return function(*args, **kwargs)

    return call


def install() -> None:
    """Count calls of what checks without an `assert`; before any test module is imported."""
    for name in ("raises", "warns"):
        setattr(pytest, name, _counted(getattr(pytest, name)))
    for name in ("array_equal", "allclose", "array_less", "equal", "array_max_ulp"):
        setattr(np.testing, f"assert_{name}", _counted(getattr(np.testing, f"assert_{name}")))


def require(report: pytest.TestReport, checked: int) -> None:
    """Turn a passed test that checked nothing into a failed one."""
    if report.when == "call" and report.passed and not checked:
        report.outcome = "failed"
        report.longrepr = (
            "nothing was checked: no assert, no pytest.raises and the like was reached"
        )


def _forget_locals() -> None:
    """Drop the copies of a test's variables that pytest took to describe a passed `assert`.

    Before Python 3.13 they stay in the frame, and what they refer to lives until the test ends.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_call_assertion_pass":
        frame = frame.f_back
    if frame is None or frame.f_back is None or sys.version_info >= (3, 13):
        return
    if frame.f_back.f_code.co_flags & inspect.CO_OPTIMIZED:  # a function's, no module's
        frame.f_back.f_locals.clear()


class Plugin:
    """Counts afresh for each test; asks for a check where no world of ranks does."""

    def __init__(self, world: bool) -> None:
        self._world = world

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        global _count
        _count = 0

    def pytest_assertion_pass(self) -> None:
        global _count
        _count += 1
        _forget_locals()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if not self._world:
            require(report, _count)
        return report

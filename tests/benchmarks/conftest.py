"""What the tests of several benchmarks use."""

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from tests.support.jobs.scripts import ROOT, imported


@pytest.fixture
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the benchmarks, for the time of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(
            imported(ROOT / "benchmarks" / f"{name}.py")
        )

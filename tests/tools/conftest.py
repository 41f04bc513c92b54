"""What tests of the tools share: programs may start, and a machine for the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tools.doctor import Machine, let_programs_start


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine of which all is well; faults are planted in it."""
    return Machine(monkeypatch, tmp_path)


@pytest.fixture(autouse=True)
def programs_start_after_each_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that has ended in this process would start no other program in it."""
    let_programs_start(monkeypatch)

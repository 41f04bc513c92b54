"""A machine for the doctor to examine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tools.doctor import Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine of which all is well; faults are planted in it."""
    return Machine(monkeypatch, tmp_path)

"""A machine for the doctor to examine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.doctor import Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """This machine, without what its variables tell; faults are planted in it."""
    return Machine(monkeypatch, tmp_path)

"""A folder for all ranks."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, world, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of all ranks, empty at first."""
    shared = world.bcast(tmp_path)
    monkeypatch.chdir(shared)
    return shared

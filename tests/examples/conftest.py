"""A folder for all ranks."""

import pytest


@pytest.fixture
def folder(tmp_path, world, monkeypatch):
    """The working directory of all ranks, empty at first."""
    shared = world.bcast(tmp_path)
    monkeypatch.chdir(shared)
    return shared

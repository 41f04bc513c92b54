"""What the tests of examples share: a folder for all ranks, and no GPUs."""

from __future__ import annotations

from pathlib import Path

import chainer
import pytest


@pytest.fixture
def folder(tmp_path: Path, world, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of all ranks, empty at first."""
    shared = world.bcast(tmp_path)
    monkeypatch.chdir(shared)
    return shared


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chainer finds none, even where there are."""
    monkeypatch.setattr(chainer.backends.cuda, "available", False)

"""Lets programs start again after a command that has ended in this process."""

from __future__ import annotations

import pytest

from chainermn_tools.jobs import children


def let_programs_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start programs as usual; afterwards too, even if a command ends in between."""
    monkeypatch.setattr(children, "_closed", False)

"""Skips what needs a GPU where there is none, saying why."""

from __future__ import annotations

import pytest

from chainermn_comm import devices


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    why = devices.problem() if marked else None
    if why is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {why}"))

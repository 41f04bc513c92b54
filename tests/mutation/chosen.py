"""A plugin of pytest that runs the tests that a file lists, in its order, and no others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mutation.executions import node_of_item

CHOSEN = "MUTATION_TESTS"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    nodes = Path(os.environ[CHOSEN]).read_text().splitlines()
    place = {node: number for number, node in enumerate(nodes)}
    others = [item for item in items if node_of_item(item) not in place]
    if others:
        config.hook.pytest_deselected(items=others)
    items[:] = sorted(
        (item for item in items if node_of_item(item) in place),
        key=lambda item: place[node_of_item(item)],
    )

"""Which tests execute which lines, recorded once by coverage over all ranks and subprocesses.

An execution is named by its number of ranks, 0 outside of worlds, and the test's node:
`2:tests/comm/test_gradients.py::test_mean`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[2]
# Holds the commit that was recorded.
COMMIT = "commit"
# A fixture that several tests share runs for the first of them alone.
SHARES_FIXTURES = re.compile(r'scope="(class|module|package|session)"')


def node_of_item(item: pytest.Item) -> str:
    """The test as pytest names it; pytest-xdist adds groups to that name."""
    groups = [
        mark.args[0] if mark.args else mark.kwargs["name"]
        for mark in item.iter_markers("xdist_group")
    ]
    return item.nodeid.removesuffix(f"@{'_'.join(groups)}")


def ranks_of(execution: str) -> int:
    """Its number of ranks."""
    return int(execution.partition(":")[0])


def node_of(execution: str) -> str:
    """The test, as pytest names it."""
    return execution.partition(":")[2]


def file_of(execution: str) -> str:
    """The test's file, relative to the repository."""
    return node_of(execution).partition("::")[0]


class Executions:
    """What `make mutation-map` recorded in a folder."""

    def __init__(self, folder: Path):
        self._data = CoverageData(str(folder / "data"))
        self._data.read()
        self._lines: dict[Path, dict[int, set[str]]] = {}
        self.commit = (folder / COMMIT).read_text().strip()
        # Of what passed: what failed while it was recorded can't tell anything.
        self.seconds: dict[str, float] = {}
        for file in folder.glob("seconds.*.json"):
            self.seconds |= json.loads(file.read_text())

    def of_file(self, path: Path) -> set[str]:
        """The executions that reach some line of the file."""
        return self.of_lines(path, self._by_line(path))

    def of_lines(self, path: Path, lines: Iterable[int]) -> set[str]:
        """The executions that reach one of these lines, and those that share fixtures with them."""
        by_line = self._by_line(path)
        found: set[str] = set()
        for line in lines:
            found |= by_line.get(line, set())
        shared = {
            (ranks_of(name), file_of(name))
            for name in found
            if SHARES_FIXTURES.search((ROOT / file_of(name)).read_text())
        }
        if shared:
            found |= {
                name
                for name in self.seconds
                if (ranks_of(name), file_of(name)) in shared
            }
        return found

    def _by_line(self, path: Path) -> dict[int, set[str]]:
        if path not in self._lines:
            contexts = self._data.contexts_by_lineno(str(path))
            self._lines[path] = {
                line: {name for name in names if name in self.seconds}
                for line, names in contexts.items()
            }
        return self._lines[path]

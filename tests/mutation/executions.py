"""Which tests execute which lines, recorded once by coverage over all ranks and subprocesses.

An execution is named by its number of ranks, 0 outside of worlds, and the test's node:
`2:tests/comm/test_gradients.py::test_mean`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from coverage import CoverageData


def ranks_of(execution: str) -> int:
    """Its number of ranks."""
    return int(execution.partition(":")[0])


def node_of(execution: str) -> str:
    """The test, as pytest names it."""
    return execution.partition(":")[2]


class Executions:
    """What `make mutation-map` recorded in a folder."""

    def __init__(self, folder: Path) -> None:
        self._data = CoverageData(str(folder / "data"))
        self._data.read()
        self._lines: dict[Path, dict[int, set[str]]] = {}
        self.seconds: dict[str, float] = {}
        for file in folder.glob("seconds.*.json"):
            self.seconds |= json.loads(file.read_text())

    def files_with(self, path: Path) -> bool:
        """Whether any test executes a line of the file."""
        return bool(self.of_file(path))

    def of_file(self, path: Path) -> set[str]:
        """The executions that reach some line of the file."""
        found: set[str] = set()
        for tests in self._by_line(path).values():
            found |= tests
        return found

    def of_lines(self, path: Path, lines: Iterable[int]) -> set[str]:
        """The executions that reach one of these lines."""
        by_line = self._by_line(path)
        return set().union(*(by_line.get(line, set()) for line in lines))

    def _by_line(self, path: Path) -> dict[int, set[str]]:
        """Of what passed: what failed while it was recorded can't tell anything."""
        if path not in self._lines:
            contexts = self._data.contexts_by_lineno(str(path))
            self._lines[path] = {
                line: {name for name in names if name in self.seconds}
                for line, names in contexts.items()
            }
        return self._lines[path]

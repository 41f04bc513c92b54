"""A plugin of pytest that tells coverage which test runs, and notes how long each takes.

`make mutation-map` loads it. A job that a test starts learns the test's name from
COVERAGE_CONTEXT.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import Coverage

from tests.mutation.executions import ROOT, node_of_item

CONTEXT = "COVERAGE_CONTEXT"


def pytest_configure(config: pytest.Config):
    """Record these tests, but not those of a pytest that one of them runs elsewhere."""
    if config.rootpath == ROOT:
        config.pluginmanager.register(Recorder(), "chainermn-recorder")


def _execution(item: pytest.Item) -> str:
    world = item.config.pluginmanager.getplugin("chainermn-world")
    size = 0
    if world:
        size = world.size
    return f"{size}:{node_of_item(item)}"


class Recorder:
    """What the plugin does in a process that runs tests of this repository."""

    def __init__(self):
        self._seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item
    ) -> Generator[None, object, object]:
        name = _execution(item)
        coverage = Coverage.current()
        assert coverage is not None, "COVERAGE_PROCESS_START must be set"
        os.environ[CONTEXT] = name
        coverage.switch_context(name)
        try:
            return (yield)
        finally:
            coverage.switch_context("")
            os.environ[CONTEXT] = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        name = _execution(item)
        if report.passed:
            self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        else:
            self._seconds[name] = float("-inf")  # whatever its other phases are
        return report

    def pytest_sessionfinish(self):
        passed = {name: each for name, each in self._seconds.items() if each >= 0}
        if passed:
            file = Path(os.environ["COVERAGE_FOLDER"], f"seconds.{os.getpid()}.json")
            file.write_text(json.dumps(passed))

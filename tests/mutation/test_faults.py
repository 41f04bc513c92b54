"""What is planted, which tests run on it, and which of them count."""

from __future__ import annotations

from pathlib import Path

import pytest
from coverage import CoverageData

from tests.mutation import __main__ as driver
from tests.mutation.executions import COMMIT, Executions
from tests.mutation.faults import Fault, draw_in, is_at_import, statement_lines

CODE = """\
LIMIT = 3


def first(x):
    if (
        x > LIMIT
    ):
        return x + 1
    return (
        x,
        LIMIT - 1,
    )


def second(x):
    return x * 2


def third(x):
    return {**x}
"""
# Neither file has fixtures that tests share.
QUICK = "0:tests/comm/test_topology.py::test_quick"
SLOW = "0:tests/comm/test_topology.py::test_slow"
ON_TWO = "2:tests/comm/test_gradients.py::test_mean"
ALONE = "0:tests/test_promises_of_time.py::test_end"
SECONDS = {QUICK: 0.1, SLOW: 30.0, ON_TWO: 0.2, ALONE: 5.0}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def executions(tmp_path, source):
    """Both tests execute `first`, the slow one alone returns its pair; nobody calls `second`.

    Of `third` some changes are no Python.
    """
    data = CoverageData(str(tmp_path / "data"))
    for name, lines in {QUICK: [5, 6, 8], SLOW: [5, 6, 9, 11, 20]}.items():
        data.set_context(name)
        data.add_lines({str(source): lines})
    data.write()
    (tmp_path / COMMIT).write_text("0123456\n")
    found = Executions(tmp_path)
    found.seconds = SECONDS
    return found


@pytest.mark.parametrize(
    ("line", "at_import", "lines"),
    [
        (1, True, range(1, 2)),
        (4, True, range(4, 5)),
        (6, False, range(5, 8)),
        (8, False, range(8, 9)),
        (11, False, range(9, 13)),
    ],
)
def test_a_line_belongs_to_its_statement(line, at_import, lines):
    assert is_at_import(CODE, line) == at_import
    assert statement_lines(CODE, line) == lines


def test_faults_are_drawn_on_lines_that_tests_execute(source, executions):
    drawn = list(draw_in([source], "4 comm", executions))
    assert drawn == list(draw_in([source], "4 comm", executions))
    assert drawn != list(draw_in([source], "5 comm", executions))
    assert len({fault.changed for fault in drawn}) == len(drawn)
    by_line = {fault.line: set(fault.tests) for fault in drawn}
    assert by_line == {
        1: {QUICK, SLOW},  # whoever imports it
        5: {QUICK, SLOW},  # `not`
        6: {QUICK, SLOW},
        8: {QUICK},
        11: {SLOW},
        20: {SLOW},  # `{*x}`; `{>>x}` is left out
    }
    assert source.read_text() == CODE


def test_commands_are_of_one_kind_and_begin_with_quick_tests():
    commands = list(driver.parts(set(SECONDS), SECONDS))
    assert commands == [[QUICK], [ON_TWO], [ALONE], [SLOW]]
    assert driver.command([QUICK, SLOW])[-4:-2] == ["-n", "3"]
    assert driver.command([ALONE])[-1] == "tests/test_promises_of_time.py"
    assert driver.command([ON_TWO])[1:3] == ["-n", "2"]


@pytest.mark.parametrize(
    ("red_with", "red_without", "found"),
    [
        ({QUICK}, set(), QUICK),
        ({SLOW}, set(), SLOW),
        ({SLOW}, {SLOW}, ""),  # it proves nothing
        ({SLOW, ALONE}, {ALONE}, SLOW),
        (set(), set(), ""),
    ],
)
def test_a_fault_is_found_by_a_test_that_passes_without_it(
    source, monkeypatch, red_with, red_without, found
):
    changed = CODE.replace("x + 1", "x - 1")

    def failing(executions: list[str], seconds: dict[str, float]) -> str:
        red = red_with if source.read_text() == changed else red_without
        failed = [name for name in executions if name in red]
        return failed[0].partition(":")[2] if failed else ""

    monkeypatch.setattr(driver, "failing", failing)
    fault = Fault(Path(source), CODE, changed, 8, "", "", tuple(SECONDS))
    assert driver.judge(fault, SECONDS) == found.partition(":")[2]
    assert source.read_text() == CODE

"""The options of `chainermn bench`, before anything is started."""

import sys

import pytest
from click.testing import CliRunner

from chainermn_tools.bench import worker
from chainermn_tools.cli import bench
from chainermn_tools.launch import JobResult
from tests.support.bench import report


@pytest.fixture
def refused(monkeypatch):
    """What is said where nothing may be started."""
    for name in ("measure_on", "measure_here"):
        monkeypatch.setattr(worker, name, lambda *_: pytest.fail("started"))

    def said(*arguments: str, **env: str) -> str:
        done = CliRunner().invoke(bench.bench, arguments, env=env)
        assert done.exit_code == 2
        return " ".join(done.output.split())

    return said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--communicator", "flatt"], "no communicator 'flatt' to measure; use naive, flat,"),
        (["--communicator", "dummy"], "no communicator 'dummy'"),
        (["--max-size", "1X"], "'1X' is no size"),
        (["--max-size", "512"], "less than the smallest"),
        (["--plot", "/nowhere/bench.png"], "can't be written"),
        (["--plot", "bench.xyz"], "should end in one of"),
        (["--plot", "."], "can't be written"),
        (["-n", "0"], "0"),
        (["--seconds", "0"], "0"),
        (["--seconds", "nan"], "nan is no number of seconds"),
    ],
)
def test_wrong_options_are_named_before_anything_is_started(arguments, said, refused):
    assert said in refused(*arguments)


def test_a_missing_matplotlib_names_the_extra(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "chainermn-tools[plot]" in refused("--plot", "bench.png")


def test_another_number_of_ranks_than_the_launchers_is_refused(refused):
    assert "started 3 ranks" in refused("-n", "2", PMI_RANK="0", PMI_SIZE="3")


def test_the_status_says_whether_all_was_right(monkeypatch):
    for right, status in ((True, 0), (False, 1)):
        found = JobResult(True, 0), report(correct=right)
        monkeypatch.setattr(worker, "measure_on", lambda *_, found=found: found)
        assert CliRunner().invoke(bench.bench).exit_code == status

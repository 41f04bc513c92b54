"""The options of `chainermn bench`, before anything is started."""

from __future__ import annotations

import sys

import click
import pytest
from click.testing import CliRunner

from chainermn_tools.commands import bench
from tests.support.bench import report


def called(*arguments: object, env: dict[str, str] | None = None) -> click.testing.Result:
    return CliRunner().invoke(bench.bench, [str(one) for one in arguments], env=env)


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
def test_wrong_options_are_named_before_anything_is_started(arguments, said, monkeypatch):
    monkeypatch.setattr(bench, "_report", lambda *_: pytest.fail("started"))
    done = called(*arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())


def test_a_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "_report", lambda *_: pytest.fail("started"))
    done = called("--plot", "bench.png")
    assert done.exit_code == 2
    assert "chainermn-tools[plot]" in done.output


def test_another_number_of_ranks_than_the_launchers_is_refused(monkeypatch):
    monkeypatch.setattr(bench, "_report", lambda *_: pytest.fail("started"))
    done = called("-n", 2, env={"PMI_RANK": "0", "PMI_SIZE": "3"})
    assert done.exit_code == 2
    assert "started 3 ranks" in done.output


def test_the_status_says_whether_all_was_right(monkeypatch):
    for right, status in ((True, 0), (False, 1)):
        monkeypatch.setattr(bench, "_report", lambda *_, good=right: report(right=good))
        assert called().exit_code == status

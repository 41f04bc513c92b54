"""The options of `chainermn bench`, before anything is started."""

import sys

import click
import pytest
from click.testing import CliRunner

from chainermn_tools.cli import bench
from chainermn_tools.cli.bench import sizes_to_measure
from tests.support.tools.bench import measured, start_nothing


@pytest.fixture
def refused(monkeypatch):
    """What is said where nothing may be started."""
    start_nothing(monkeypatch)

    def said(*arguments: str, **env: str) -> str:
        done = CliRunner().invoke(bench.bench, arguments, env=env)
        assert done.exit_code == 2
        return " ".join(done.output.split())

    return said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--communicator", "flatt"],
            "no communicator 'flatt' to measure; use naive, flat,",
        ),
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
        measured(monkeypatch, correct=right)
        assert CliRunner().invoke(bench.bench).exit_code == status


# Sizes as users write them


@pytest.mark.parametrize(
    ("written", "largest"),
    [
        ("1024", 1 << 10),
        ("64k", 1 << 16),
        ("16MB", 1 << 24),
        ("1 GiB", 1 << 30),
        ("4T", 1 << 42),
    ],
)
def test_sizes_are_read(written, largest):
    assert sizes_to_measure(written)[-1] == largest


def test_the_units_are_powers_of_1024():
    assert sizes_to_measure("2T")[-1] == 1 << 40


@pytest.mark.parametrize(
    "written", ["", "K", "-1K", "1.5M", "1X", "1e6", "9" * 30, "1K;id"]
)
def test_what_is_no_size_is_refused(written):
    with pytest.raises(click.UsageError, match="is no size"):
        sizes_to_measure(written)


def test_sizes_go_from_1_kib_by_fours():
    assert sizes_to_measure("256M") == [4**power << 10 for power in range(10)]
    assert sizes_to_measure("5000") == [1024, 4096]

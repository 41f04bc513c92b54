"""The file that a user with GPUs attaches to a report."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu import report

pytestmark = pytest.mark.ci


def command(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_it_holds_what_each_command_printed_and_how_it_ended(tmp_path, capfd):
    path = tmp_path / "report.txt"
    good = command(
        "import sys; print('to stdout'); print('to stderr', file=sys.stderr)"
    )
    bad = command("print('then it fails'); raise SystemExit(3)")
    late = command("import time; print('it hangs', flush=True); time.sleep(600)")
    assert not report.write_report([late, bad, good], path, seconds=5)
    text = path.read_text()
    shown = capfd.readouterr().out
    for line in ("to stdout", "to stderr", "then it fails", "it hangs"):
        assert f"\n{line}\n" in text
        assert line in shown
    ended = text.partition("=== how each ended\n")[2].splitlines()
    assert [line.partition(":")[0] for line in ended] == [
        "took more than 5 s",
        "3",
        "ok",
    ]
    assert report.write_report([good], path)
    assert report.write_report([[*bad, "doctor"]], path)  # it warns


@pytest.mark.parametrize(
    ("ranks", "worlds"), [(1, ["1", "2"]), (2, ["1", "2"]), (8, ["1", "2", "8"])]
)
def test_the_tests_run_on_one_rank_on_two_and_on_as_many_as_there_are_gpus(
    ranks, worlds
):
    found = report.commands(ranks, "mpiexec")
    assert [
        each[2] for each in found if each[0] == "mpiexec" and "pytest" in each
    ] == worlds
    assert found[-1] == [
        "mpiexec",
        "-n",
        str(ranks),
        sys.executable,
        "benchmarks/gpu.py",
    ]


def test_its_commands_are_such_as_there_are():
    """But for the launcher's, which take ranks: pytest collects, and the tools know their names."""
    env, doctor, alone = report.commands(1, "mpiexec")[:3]
    for each in (
        [*env[:4], "--help"],
        [*doctor[:4], "--help"],
        [*alone, "--collect-only", "-q"],
    ):
        assert subprocess.run(each, capture_output=True, timeout=120).returncode == 0

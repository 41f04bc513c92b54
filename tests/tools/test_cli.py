"""The command line itself: its table, `python -m`, and outputs that can't be written."""

import re
import subprocess
from importlib import metadata

import pytest

from chainermn_tools.cli import COMMANDS
from tests.support.jobs.commands import (
    BIN,
    SECONDS,
    chainermn,
    environment,
    invoke,
    run,
    start,
)
from tests.support.jobs.scripts import ROOT


def test_the_module_and_the_program_that_is_installed_are_the_command():
    done = chainermn("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: chainermn ")
    assert all(name in done.stdout for name in COMMANDS)
    said = run(BIN / "chainermn", "--version").stdout
    assert said.split() == ["chainermn-tools", metadata.version("chainermn-tools")]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_said_without_a_traceback(unbuffered):
    variables = environment(PYTHONUNBUFFERED=unbuffered)
    with open("/dev/full", "w") as full:
        command = start("--help", stdout=full, stderr=subprocess.PIPE, env=variables)
    said = command.communicate(timeout=SECONDS)[1]
    assert command.returncode == 74
    assert (
        said == "chainermn: the output could not be written: No space left on device\n"
    )


def test_closed_streams_are_no_error():
    words = "exec chainermn explain missing.log >&- 2>&-"
    done = run("sh", "-c", words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_reader_that_leaves_gives_a_status_and_no_words():
    command = start("--help", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    command.stdout.close()
    assert command.communicate(timeout=SECONDS)[1] == ""
    assert command.returncode == 74


@pytest.mark.parametrize("seconds", ["nan", "5"])
def test_what_is_no_time_is_named(seconds):
    done = invoke("doctor", "--timeout", seconds)
    assert done.exit_code == 2
    said = rf"Invalid value for '--timeout': '?{seconds}'? is not "
    assert re.search(said, done.output)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example_and_plain_ranges(name):
    done = invoke(name, "--help")
    assert re.search(rf"^ {{6}}.*\bchainermn {name}\b", done.output, re.M), done.output
    assert not re.search(r"\[default|<=x", done.output), done.output


def test_a_shell_gets_completions_as_the_readme_says():
    readme = (ROOT / "packages/chainermn-tools/README.md").read_text()
    assert "_CHAINERMN_COMPLETE=bash_source chainermn" in readme
    words = {"COMP_WORDS": "chainermn re", "COMP_CWORD": "1"}
    done = chainermn(_CHAINERMN_COMPLETE="bash_complete", **words)
    assert "report" in done.stdout, done.stderr

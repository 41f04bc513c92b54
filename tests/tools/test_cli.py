"""The command line itself: its table, `python -m`, and outputs that can't be written."""

import re
import subprocess
from importlib import metadata

import click
import pytest

from chainermn_tools.cli import COMMANDS, commands
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
from tests.support.plugins.pairwise import tiered


def test_every_command_of_the_table_is_there_with_help():
    context = click.Context(commands)
    assert set(COMMANDS) >= {"env", "explain", "launch"}
    for name in COMMANDS:
        command = commands.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.get_short_help_str()
    assert commands.get_command(context, "nonsense") is None


def test_the_module_and_the_program_that_is_installed_are_the_command():
    done = chainermn("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: chainermn ")
    assert all(name in done.stdout for name in COMMANDS)
    said = run(BIN / "chainermn", "--version").stdout
    assert said.split() == ["chainermn-tools", metadata.version("chainermn-tools")]


def test_an_unknown_command_is_a_usage_error():
    done = chainermn("nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr


@pytest.mark.parametrize(
    ("argument", "unbuffered"),
    tiered(
        [("--help", ""), ("explain", "1")],
        ("--help", "explain", "--version"),
        ("", "1"),
    ),
)
def test_a_full_disk_is_said_without_a_traceback(argument, unbuffered):
    variables = environment(PYTHONUNBUFFERED=unbuffered)
    with open("/dev/full", "w") as full:
        command = start(argument, stdout=full, stderr=subprocess.PIPE, env=variables)
    said = command.communicate(timeout=SECONDS)[1]
    assert command.returncode == 74
    assert (
        said == "chainermn: the output could not be written: No space left on device\n"
    )


def test_a_full_disk_for_errors_too_changes_no_more_than_the_status():
    with open("/dev/full", "w") as full:
        assert start("nonsense", stdout=full, stderr=full).wait(SECONDS) not in (0, 120)


def test_a_reader_that_leaves_is_no_error():
    command = start("--help", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None
    command.stdout.close()
    assert command.communicate(timeout=SECONDS)[1] == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example_and_names_the_manual(name):
    done = invoke(name, "--help")
    assert re.search(rf"^ {{6}}.*\bchainermn {name}\b", done.output, re.M), done.output
    assert "docs of ChainerMN's repository" in " ".join(done.output.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_get_completions_as_the_readme_says(shell):
    readme = (ROOT / "packages/chainermn-tools/README.md").read_text()
    assert f"_CHAINERMN_COMPLETE={shell}_source chainermn" in readme
    words = {
        "COMP_WORDS": "chainermn re",
        "COMP_CWORD": "re" if shell == "fish" else "1",
    }
    done = chainermn(_CHAINERMN_COMPLETE=f"{shell}_complete", **words)
    assert "report" in done.stdout, done.stderr

"""The command line itself: its table, `python -m`, and outputs that can't be written."""

from __future__ import annotations

import os
import subprocess

import click
import pytest

from chainermn_tools.cli import COMMANDS, commands
from tests.support.commands import MODULE, SECONDS, chainermn


def test_every_command_of_the_table_is_there_with_help():
    context = click.Context(commands)
    assert set(COMMANDS) >= {"env", "explain", "launch"}
    for name in COMMANDS:
        command = commands.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert command.get_short_help_str()
    assert commands.get_command(context, "nonsense") is None


def test_the_module_is_the_command():
    done = chainermn("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: chainermn ")
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (("--help",), ""),
        (("explain",), "1"),
        *(
            pytest.param((one,), unbuffered, marks=pytest.mark.full)
            for one, unbuffered in (("--help", "1"), ("--version", ""), ("--version", "1"))
        ),
        pytest.param(("explain",), "", marks=pytest.mark.full),
    ],
)
def test_a_full_disk_is_said_without_a_traceback(arguments, unbuffered):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*MODULE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=SECONDS,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 74
    assert done.stderr == "chainermn: the output could not be written: No space left on device\n"


def test_a_full_disk_for_errors_too_changes_no_more_than_the_status():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*MODULE, "nonsense"], stdout=full, stderr=full, timeout=SECONDS)
    assert done.returncode not in (0, 120)


def test_a_reader_that_leaves_is_no_error():
    command = subprocess.Popen(
        [*MODULE, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    command.stdout.close()
    assert command.communicate(timeout=SECONDS)[1] == ""

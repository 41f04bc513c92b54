"""The command `chainermn`: a list of subcommands, and each of them in a file."""

from chainermn_tools.cli.entry_point import COMMANDS, commands, main

__all__ = ["COMMANDS", "commands", "main"]

"""The subcommands of `chainermn`, one a file; `chainermn_tools.cli.COMMANDS` lists them."""

__all__: list[str] = []

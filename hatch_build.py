"""Writes the stubs of `chainermn`, by which type checkers see its modules.

Hatchling runs it at each build, so they always agree with the table that the modules are
made of.
"""

import re
import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).parent / "src"
# CuPy has no types, and may be missing.
NCCL = """from typing import Any
_available: bool
def get_version() -> int: ...
def get_build_version() -> int: ...
def __getattr__(name: str) -> Any: ...
"""


class Stubs(BuildHookInterface):  # type: ignore[type-arg]
    """One file for each module, from the table that `chainermn` itself is made from."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        write(SOURCE / "chainermn-stubs")


def write(folder: Path) -> None:
    """Write the stubs into the folder, which stands for ``chainermn``."""
    table = runpy.run_path(str(SOURCE / "chainermn_facade" / "_table.py"))
    stubs = {path: _re_exporting(source) for path, source in table["SOURCES"].items()}
    stubs["nccl"] = NCCL
    stubs[""] = "from chainermn_facade import *\n"
    for path, text in stubs.items():
        children = [name for name in stubs if name and name.rpartition(".")[0] == path]
        for name in (each.rpartition(".")[2] for each in sorted(children)):
            # Else a name's module.
            if f" {name} as " not in stubs[f"{path}.{name}".lstrip(".")]:
                text += f"from . import {name} as {name}\n"
        stem = folder.joinpath(*path.split(".")) if path else folder
        file = stem / "__init__.pyi" if children else stem.with_suffix(".pyi")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def _re_exporting(source: str) -> str:
    """Return imports as stubs have them: there only `x as x` gives `x` to others."""
    lines = []
    for line in source.splitlines():
        head, _, names = line.partition(" import ")
        named = names if names == "*" else re.sub(r"\w+", r"\g<0> as \g<0>", names)
        lines.append(f"{head} import {named}\n")
    return "".join(lines)

"""All public names and their signatures are those of `given/signatures.txt`.

A change of one is a change for users: it belongs into CHANGELOG.md, and then into that
file, which `python -m tests.packaging.test_signatures` writes anew.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

TABLE = Path(__file__).parent / "given" / "signatures.txt"
MODULES = (
    "chainermn",
    "chainermn.communicators",
    "chainermn.datasets",
    "chainermn.extensions",
    "chainermn.functions",
    "chainermn.global_except_hook",
    "chainermn.iterators",
    "chainermn.links",
    "chainermn.optimizers",
    "chainermn_comm",
    "chainermn_train",
    "chainermn_train.extensions",
    "chainermn_modelparallel",
    "chainermn_tools",
)
OURS = ("chainermn",)


def lines():
    """Each public name once for each module that exports it; what classes define, once."""
    shown = set()
    for path in MODULES:
        module = importlib.import_module(path)
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if inspect.ismodule(value) or name == "__version__":
                yield f"{path}.{name}"
            else:
                yield f"{path}.{name}{signature(value)}"
                if inspect.isclass(value) and value not in shown:
                    shown.add(value)
                    yield from (f"{path}.{name}.{line}" for line in members(value))


def members(kind):
    """The public members that the class, or one of ours that it is derived from, defines."""
    found = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith(OURS):
            found |= vars(base)
    for name in sorted(found):
        if not name.startswith("_"):
            value = getattr(kind, name)
            yield name + (signature(value) if callable(value) else "")


def signature(value):
    """The parameters' names, kinds and defaults."""
    try:
        found = inspect.signature(value)
    except ValueError:  # an exception's
        return "(...)"
    bare = [each.replace(annotation=each.empty) for each in found.parameters.values()]
    text = str(found.replace(parameters=bare, return_annotation=found.empty))
    return re.sub(r"=<[^>]*>", "=<object>", text)


def test_public_names_and_their_signatures_are_those_of_the_table():
    expected = TABLE.read_text().splitlines()
    found = list(lines())
    assert found == expected, "run python -m tests.packaging.test_signatures"


if __name__ == "__main__":
    TABLE.write_text("\n".join(lines()) + "\n")

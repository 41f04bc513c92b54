"""Public names of the `chainermn` that Python finds, and their signatures, a line each.

``CHAINERMN_USE_BUNDLED=1 python -m tests.compatibility.signatures`` writes those of
Chainer 7's into ``given/chainer7.txt``.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import chainer
import chainermn
import numpy

GIVEN = Path(__file__).parent / "given"
TABLE = GIVEN / "chainer7.txt"
# Names in a table's defaults.
NAMES = {"chainer": chainer, "numpy": numpy}
NAMED = {chainer.dataset.concat_examples: "chainer.dataset.concat_examples"}
EMPTY = inspect.Parameter.empty
POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
KEYWORD = inspect.Parameter.KEYWORD_ONLY
VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}


def lines() -> Iterator[str]:
    """Modules, what they define or a package re-exports, and what classes define."""
    for path in modules():
        yield path
        for name, value in sorted(vars(importlib.import_module(path)).items()):
            origin = str(getattr(value, "__module__", ""))
            if name.startswith("_") or inspect.ismodule(value) or not callable(value):
                continue
            if origin == path or (origin.startswith(f"{path}.") and is_package(path)):
                yield f"{path}.{name}{signature(value)}"
                if inspect.isclass(value) and origin == path:
                    yield from (f"{path}.{name}.{member}" for member in members(value))


def modules() -> Iterator[str]:
    yield "chainermn"
    for module in pkgutil.walk_packages(chainermn.__path__, "chainermn."):
        if "._" not in module.name:
            yield module.name


def is_package(path: str) -> bool:
    return hasattr(importlib.import_module(path), "__path__")


def members(kind: type) -> Iterator[str]:
    for name, value in sorted(vars(kind).items()):
        if not name.startswith("_"):
            yield name + (signature(value) if callable(value) else "")


def signature(value) -> str:
    """As it stands in code, without annotations; "()" if Python knows none."""
    try:
        found = inspect.signature(value)
    except ValueError:  # of an exception
        return "()"
    parameters = [
        each.replace(default=Written(each.default), annotation=EMPTY)
        if each.default is not EMPTY
        else each.replace(annotation=EMPTY)
        for each in found.parameters.values()
    ]
    return str(
        found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    )


class Written:
    """A default whose `repr` Python can evaluate."""

    def __init__(self, value):
        self.value = value

    def __repr__(self) -> str:
        if isinstance(self.value, type):
            return f"{self.value.__module__}.{self.value.__qualname__}"
        known = [name for value, name in NAMED.items() if value is self.value]
        if known:
            return known[0]
        return repr(self.value)


def tables() -> dict[str, list[str]]:
    """The lines of both tables by the table's name and the path, which two lines may have."""
    named: dict[str, list[str]] = {}
    for table in (GIVEN / "chainermn1.txt", TABLE):
        for line in table.read_text().splitlines():
            named.setdefault(f"{table.stem} {line.partition('(')[0]}", []).append(line)
    return named


def read(line: str) -> tuple[str, inspect.Signature | None]:
    """The path and the signature of a line."""
    path, bracket, rest = line.partition("(")
    if not bracket:
        return path, None
    function = eval(f"lambda {rest.removesuffix(')')}: None", NAMES)
    return path, inspect.signature(function)


def found(path: str, called: bool = False):
    """What is at a path: a module, or what is reached from one by its attributes.

    Where a module and a function have one path, ``called`` asks for the function.
    """
    parent, _, name = path.rpartition(".")
    try:
        if not called:
            return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not path.startswith(str(error.name)) or not parent:
            raise
    holder = found(parent)
    if not hasattr(holder, name):
        raise AttributeError(f"{parent} has no {name}")
    return getattr(holder, name)


def refusals(before: inspect.Signature, now: inspect.Signature) -> Iterator[str]:
    """Which calls that one allows the other doesn't."""
    places = [each.name for each in now.parameters.values() if each.kind is POSITIONAL]
    for place, (name, old) in enumerate(before.parameters.items()):
        new = now.parameters.get(name)
        if old.kind in VARIADIC:
            if old.kind not in {each.kind for each in now.parameters.values()}:
                yield f"it takes no more {old}"
        elif new is None or new.kind not in (POSITIONAL, KEYWORD):
            yield f"{name} is missing"
        elif old.kind is POSITIONAL and places[place : place + 1] != [name]:
            yield f"{name} isn't argument {place}"
        elif old.default is not EMPTY and repr(Written(old.default)) != repr(
            Written(new.default)
        ):
            yield f"the default of {name} was {old.default!r} and is {new.default!r}"
    for name, new in now.parameters.items():
        if (
            name not in before.parameters
            and new.default is EMPTY
            and new.kind not in VARIADIC
        ):
            yield f"{name} must be given"


if __name__ == "__main__":
    if os.environ.get("CHAINERMN_USE_BUNDLED") != "1":
        raise SystemExit("the table is of Chainer 7's: set CHAINERMN_USE_BUNDLED=1")
    TABLE.write_text("".join(f"{line}\n" for line in lines()))

"""What 1.3's documents and Chainer 7's `chainermn` name can be imported, and called as there."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest

from tests.compatibility import listed
from tests.compatibility.signatures import TABLE, found, read, refusals, tables
from tests.support.jobs import commands
from tests.support.jobs.scripts import ROOT

LINES = tables()
DIFFERENCES = [each for each in listed.load() if each.signatures]
# Each is a module and, in the package that holds it, a function.
TWOFOLD = ["chainermn.functions.pseudo_connect", "chainermn.links.create_mnbn_model"]


def problems(line):
    path, before = read(line)
    try:
        value = found(path, called=before is not None)
    except (ImportError, AttributeError) as error:
        return [str(error)]
    if before is None or (inspect.isclass(value) and issubclass(value, Exception)):
        return []
    return [*refusals(before, inspect.signature(value))]


@pytest.mark.parametrize("name", LINES)
def test_it_can_be_called_as_before(name):
    entries = [each for each in DIFFERENCES if listed.matches(name, each.signatures)]
    found = [problem for line in LINES[name] for problem in problems(line)]
    assert bool(found) == bool(entries), "; ".join(found) or "this differs no more"


@pytest.mark.parametrize("path", TWOFOLD)
def test_a_function_stays_where_a_module_of_its_name_is_imported(path):
    package, _, name = path.rpartition(".")
    holder = importlib.import_module(package)
    function = getattr(holder, name)
    assert callable(function)
    assert getattr(importlib.import_module(path), name) is function
    assert getattr(holder, name) is function


def test_the_table_is_of_the_chainermn_that_chainer_bundles():
    script = (
        "from tests.compatibility.signatures import lines; print(*lines(), sep='\\n')"
    )
    done = commands.run(
        sys.executable, "-c", script, cwd=ROOT, CHAINERMN_USE_BUNDLED="1"
    )
    assert done.stdout == TABLE.read_text(), done.stderr

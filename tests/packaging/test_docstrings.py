"""Every public name says what it is, what it takes, and whether all ranks must call it."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

PACKAGES = ("chainermn_comm", "chainermn_train", "chainermn_modelparallel", "chainermn_tools")
# A subpackage whose names are public too.
MORE = ("chainermn_train.extensions",)
# Methods of Python's or Chainer's, which say themselves what they are.
INHERITED = re.compile(r"__\w+__|forward|backward|serialize|initialize|finalize|trigger")


def public() -> Iterator[tuple[str, Any]]:
    """Each public function, class and method, by its full name."""
    for package in PACKAGES + MORE:
        module = importlib.import_module(package)
        for name in module.__all__:
            thing = getattr(module, name)
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            yield f"{package}.{name}", thing
            if inspect.isclass(thing) and not issubclass(thing, Exception):
                for attribute, method in inspect.getmembers(thing, inspect.isfunction):
                    ours = (method.__module__ or "").startswith("chainermn")
                    if ours and not attribute.startswith("_"):
                        yield f"{package}.{name}.{attribute}", method


NAMED = dict(public())


def documentation(thing: Any, name: str) -> str:
    """The docstring, or the one it inherits; of a class with that of its `__init__`."""
    owner, _, method = name.rpartition(".")
    # From a class, a method has the docstring that it inherits.
    thing = getattr(NAMED[owner], method) if owner in NAMED else thing
    text = inspect.getdoc(thing) or ""
    if inspect.isclass(thing):
        own = thing.__dict__.get("__init__")
        text += "\n" + (inspect.getdoc(own) or "" if own else "")
    return text


def arguments(name: str) -> list[str]:
    """The arguments that the docstring must mention."""
    if INHERITED.fullmatch(name.rpartition(".")[2]):
        return []
    try:
        parameters = inspect.signature(NAMED[name]).parameters
    except ValueError:
        return []
    known = ("self", "cls", "args", "kwargs")
    return [each for each in parameters if each not in known and not each.startswith("_")]


def test_each_public_name_has_a_docstring() -> None:
    assert len(NAMED) > 50
    assert not [name for name in NAMED if len(documentation(NAMED[name], name).split()) < 3]


def test_each_argument_is_mentioned() -> None:
    asked = [(name, argument) for name in NAMED for argument in arguments(name)]
    assert len(asked) > 50
    assert not [
        f"{name}: {argument}"
        for name, argument in asked
        if not re.search(rf"\b{re.escape(argument)}\b", documentation(NAMED[name], name))
    ]


COLLECTIVE = (
    "bcast gather allgather scatter alltoall allreduce bcast_obj gather_obj allgather_obj "
    "scatter_obj allreduce_obj bcast_data allreduce_grad multi_node_mean_grad split finalize"
)


@pytest.mark.parametrize("name", COLLECTIVE.split())
def test_a_communicators_collective_methods_say_so(name):
    text = inspect.getdoc(getattr(NAMED["chainermn_comm.CommunicatorBase"], name)) or ""
    assert "collective" in text.lower()


@pytest.mark.parametrize(
    "name",
    [
        "chainermn_comm.create_communicator",
        "chainermn_train.create_multi_node_optimizer",
        "chainermn_train.create_multi_node_evaluator",
        "chainermn_train.create_multi_node_checkpointer",
        "chainermn_train.create_multi_node_iterator",
        "chainermn_train.create_synchronized_iterator",
        "chainermn_train.scatter_dataset",
        *(
            f"chainermn_modelparallel.{name}"
            for name in ("bcast", "gather", "scatter", "alltoall", "allgather", "allreduce")
        ),
    ],
)
def test_what_all_ranks_must_call_says_so(name):
    assert "collective" in documentation(NAMED[name], name).lower()

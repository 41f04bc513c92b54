"""Every public name says what it is, what it takes, and whether all ranks must call it."""

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

PACKAGES = ("chainermn_comm", "chainermn_train", "chainermn_modelparallel", "chainermn_tools")
# Methods of Python's or Chainer's, which say themselves what they are.
INHERITED = re.compile(r"__\w+__|forward|backward|serialize|initialize|finalize|trigger")


def public() -> Iterator[tuple[str, Any]]:
    """Each public function, class and method, by its full name."""
    for package in (*PACKAGES, "chainermn_train.extensions"):
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


def documentation(name: str) -> str:
    """The docstring, or the one it inherits; of a class with that of its `__init__`."""
    owner, _, method = name.rpartition(".")
    # From a class, a method has the docstring that it inherits.
    thing = getattr(NAMED[owner], method) if owner in NAMED else NAMED[name]
    parts = [thing, *([vars(thing).get("__init__")] if inspect.isclass(thing) else [])]
    return "\n".join(inspect.getdoc(part) or "" for part in parts if part)


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
    assert not [name for name in NAMED if len(documentation(name).split()) < 3]


def test_each_argument_is_mentioned() -> None:
    asked = [(name, argument) for name in NAMED for argument in arguments(name)]
    assert len(asked) > 50
    assert not [
        f"{name}: {argument}"
        for name, argument in asked
        if not re.search(rf"\b{re.escape(argument)}\b", documentation(name))
    ]


OF_BOTH = "bcast gather allgather scatter alltoall allreduce"
COLLECTIVE = {
    "chainermn_comm": "create_communicator",
    "chainermn_comm.CommunicatorBase": f"{OF_BOTH} bcast_obj gather_obj allgather_obj scatter_obj "
    "allreduce_obj bcast_data allreduce_grad multi_node_mean_grad split finalize",
    "chainermn_train": "create_multi_node_optimizer create_multi_node_evaluator scatter_dataset "
    "create_multi_node_checkpointer create_multi_node_iterator create_synchronized_iterator",
    "chainermn_modelparallel": OF_BOTH,
}


def test_what_all_ranks_must_call_says_so() -> None:
    names = [f"{owner}.{name}" for owner, names in COLLECTIVE.items() for name in names.split()]
    assert not [name for name in names if "collective" not in documentation(name).lower()]

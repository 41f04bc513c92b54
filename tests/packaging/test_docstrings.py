"""Every public name says what it is, takes and raises, and whether all ranks must call it."""

import importlib
import inspect
import re
from functools import cache

from chainermn_comm import create_communicator

PACKAGES = (
    "chainermn_comm",
    "chainermn_train",
    "chainermn_modelparallel",
    "chainermn_tools",
)
# What the packages don't export themselves.
MODULES = ("chainermn_train.extensions", "chainermn.global_except_hook")
# Methods of Python's or Chainer's, which say themselves what they are.
INHERITED = re.compile(
    r"__\w+__|forward|backward|serialize|initialize|finalize|trigger"
)


def public():
    """Each public function, class, method and property, by its full name."""
    for package in (*PACKAGES, *MODULES):
        module = importlib.import_module(package)
        for name in module.__all__:
            if inspect.isclass(thing := getattr(module, name)):
                yield from with_members(f"{package}.{name}", thing)
            elif inspect.isfunction(thing):
                yield f"{package}.{name}", thing
    with create_communicator("naive") as comm:
        kind = type(comm).__base__
        assert kind is not None
        yield from with_members("chainermn_comm.MpiCommunicator", kind)


def with_members(path, kind):
    yield path, kind
    if not issubclass(kind, Exception):
        for name, member in inspect.getmembers(kind):
            # A property's, or a method itself.
            function = getattr(member, "fget", member)
            ours = (getattr(function, "__module__", None) or "").startswith("chainermn")
            if ours and inspect.isroutine(function) and not name.startswith("_"):
                yield f"{path}.{name}", member


@cache
def named():
    return dict(public())


def documentation(name):
    """The docstring, or the one it inherits; of a class with that of its `__init__`."""
    owner, _, method = name.rpartition(".")
    # From a class, a method has the docstring that it inherits.
    if owner in named():
        thing = getattr(named()[owner], method)
    else:
        thing = named()[name]
    made = []
    if inspect.isclass(thing):
        made = [vars(thing).get("__init__")]
    parts = [thing, *made]
    return "\n".join(inspect.getdoc(part) or "" for part in parts if part)


def arguments(name):
    """The arguments that the docstring must mention."""
    if INHERITED.fullmatch(name.rpartition(".")[2]):
        return []
    try:
        parameters = inspect.signature(named()[name]).parameters
    except (TypeError, ValueError):  # a property; a class of C
        return []
    known = ("self", "cls", "args", "kwargs")
    return [
        each for each in parameters if each not in known and not each.startswith("_")
    ]


def test_each_public_name_has_a_docstring():
    assert len(named()) > 50
    assert not [name for name in named() if len(documentation(name).split()) < 3]


def test_each_argument_is_mentioned():
    asked = [(name, argument) for name in named() for argument in arguments(name)]
    assert len(asked) > 50
    assert not [
        f"{name}: {argument}"
        for name, argument in asked
        if not re.search(rf"\b{re.escape(argument)}\b", documentation(name))
    ]


# What involves this rank only, by the end of its name.
LOCAL = r"Error|Topology(\.(?!discover)\w+)?|\.[sg]et_config|mpi_comm|_?(rank|size)"
LOCAL += r"|\.(aggregate|calc_local|copy|add_link|setup)|create_empty_dataset|ResumableOrderSampler"
LOCAL += r"|extensions.*\.finalize|(Trigger|Aggregator)\.serialize|render"
# What involves one other rank.
PEER = r"(send|recv)(_obj|_with_metadata)?"
# What neither checks arguments nor communicates, besides properties.
UNCHECKED = (
    r"Error|Topology|_rank|_size|\.(restrict|aggregate|calc_local|copy|on_error)|_hook"
)
UNCHECKED += (
    r"|create_empty_dataset|extensions.*\.(finalize|serialize)|Iterator\.finalize"
)
UNCHECKED += r"|Checkpointer\.(initialize|get_stats)|render|collect"


def names_but(exceptions):
    return [name for name in named() if not re.search(rf"({exceptions})$", name)]


def test_what_all_ranks_must_call_says_so():
    names = names_but(f"{LOCAL}|Communicator\\w*\\.{PEER}")
    assert len(names) > 50
    assert not [
        name for name in names if "collective" not in documentation(name).lower()
    ]


def test_what_is_raised_is_said():
    names = [
        name for name in names_but(UNCHECKED) if not isinstance(named()[name], property)
    ]
    names += ["chainermn_comm.CommunicatorBase.intra_size"]
    assert len(names) > 50
    silent = [
        name for name in names if not re.search(r"\b[Rr]aise", documentation(name))
    ]
    assert not [name for name in silent if not says_for_all(name)]


def says_for_all(name):
    """Whether it is of those whose class, or module, says what they all raise, by each error."""
    if re.match(r"chainermn_comm\.(CommunicatorBase|MpiCommunicator)\.", name):
        said = inspect.getdoc(named()["chainermn_comm.CommunicatorBase"]) or ""
    else:
        said = inspect.getmodule(named()[name]).__doc__ or ""  # type: ignore[union-attr]
    return all(
        error in said
        for error in ("TypeError", "ValueError", "PeerError", "MismatchError")
    )

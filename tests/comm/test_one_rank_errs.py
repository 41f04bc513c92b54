"""What one rank does wrong is raised on all, and the communicator works afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from chainermn_comm import create_communicator
from tests.comm.methods import SIZE, x
from tests.support.oracles.raised import raises_on_all
from tests.support.worlds.models import check_mean, with_grads
from tests.support.worlds.third_party import Inheriting

# A handshake comes before any algorithm is made, so names make no difference. Three
# ranks show all that two do.
pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4), pytest.mark.ranks(3)]

EACH = [x] * SIZE
READ_ONLY = np.zeros(3, "f4")
READ_ONLY.flags.writeable = False


class Raising:
    """Raises an error when it is pickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


class Bomb:
    def __reduce__(self):
        return int, ("can't be unpickled",)


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Ambiguous:
    def __bool__(self):
        raise ValueError("neither true nor false")


UNPICKLABLE = Raising(RuntimeError("can't be pickled"))
NO_ARRAYS = [Raising, None, "text", [[1, 2], [3]], {"a": 1}, np.array([Bomb()])]
NO_SUMS = [
    *[np.zeros(2, dtype) for dtype in ("U3", "datetime64[D]", "V4")],
    np.rec.array([(1.0, 2)], dtype="f8,i4"),
]
NO_LISTS = [None, 5, {0: 1}, {1, 2, 3}, iter([]), np.array(1.0), [], [1], [1] * 9]
NO_GRADS = [np.ones(2, "i4"), np.ones(2, object), [1.0], "grad", np.ones(2, "f4,f4")]
NO_INTEGERS = (-1, 99, 1.0, None, "0", True, [0], {})


@dataclass
class Case:
    """Calls of methods with what is right, and what one rank may do wrong."""

    names: str
    right: Any
    wrong: Sequence[Any]
    error: type[BaseException]
    words: str | None
    rank: int = 1
    is_inherited: bool = False  # by a third party's class, of the base
    call: Callable[[Any, Any], Any] = lambda method, given: method(given)


def several(method, given):
    return method(*given)


def mean_of(method, grad):
    model = with_grads(w=x.copy())
    model["w"].grad = grad
    method(model)


ROOM = np.zeros(3, "f4")
CASES = [
    Case(
        "bcast gather allgather allreduce",
        x,
        NO_ARRAYS,
        TypeError,
        r"rank 0.*_obj",
        rank=0,
    ),
    Case("allreduce", x, ["x"], TypeError, "rank 1", is_inherited=True),
    Case("allreduce", (x, x), [(x, "x")], TypeError, "rank 1", is_inherited=True),
    Case("allreduce", x, NO_SUMS, TypeError, r"rank 1.*can't take the sum"),
    Case("alltoall", EACH, NO_LISTS, ValueError, "rank 1: .*expected .*values"),
    Case(
        "scatter scatter_obj alltoall_obj reduce_scatter",
        EACH,
        NO_LISTS,
        ValueError,
        r"rank 0: .*expected .*values",
        rank=0,
        is_inherited=True,
    ),
    Case("bcast_obj", 1, [UNPICKLABLE], RuntimeError, "can't be pickled", rank=0),
    Case(
        "gather_obj allreduce_obj", 1, [UNPICKLABLE], RuntimeError, "can't be pickled"
    ),
    Case("allgather_obj", 1, [Raising(Silent)], Silent, None),
    Case("bcast_obj", 1, [Raising(KeyboardInterrupt)], KeyboardInterrupt, None, rank=0),
    Case(
        "bcast gather scatter bcast_obj gather_obj scatter_obj",
        0,
        NO_INTEGERS,
        ValueError,
        r"rank 1.*root must be an integer",
        call=lambda method, root: method(EACH, root=root),
    ),
    Case(
        "allreduce",
        "sum",
        ["mean", 1],
        ValueError,
        "op",
        call=lambda method, op: method(x, op),
    ),
    Case(
        "reduce_scatter",
        "sum",
        ["mean", None],
        ValueError,
        "op .*must be one of sum, max, min",
        is_inherited=True,
        call=lambda method, op: method(EACH, op),
    ),
    Case(
        "reduce_scatter",
        x,
        [x.astype("c8"), "x"],
        TypeError,
        "rank 1",
        is_inherited=True,
        call=lambda method, it: method([it] * SIZE, "max"),
    ),
    Case(
        "multi_node_mean",
        (x, ROOM),
        [
            ("x", None),
            (x, np.zeros(4, "f4")),
            (x, READ_ONLY),
            (x, [0, 0, 0]),
        ],
        ValueError,
        None,
        is_inherited=True,
        call=several,
    ),
    Case(
        "multi_node_mean",
        (x, ROOM),
        [(x, np.empty(3, dtype)) for dtype in ("i8", "?", "U3", "f4,i4")],
        ValueError,
        "recvbuf of multi_node_mean .* can hold float32",
        call=several,
    ),
    Case(
        "multi_node_mean_grad",
        True,
        [Ambiguous()],
        ValueError,
        "neither true",
        call=lambda method, zero_fill: method(with_grads(w=x.copy()), zero_fill),
    ),
    Case("allreduce_grad", x, NO_GRADS, TypeError, "rank 1", call=mean_of),
    Case(
        "multi_node_mean_grad",
        with_grads(w=x.copy()),
        ["x"],
        AttributeError,
        "namedparams",
        is_inherited=True,
        call=lambda method, model: method(model, zero_fill=True),
    ),
    Case(
        "make_reducer",
        b"1",
        ["words", None],
        TypeError,
        "the payload of allreduce_grad must be bytes",
        call=lambda method, payload: method().agree(payload=payload),
    ),
    Case(
        "split",
        (0, 0),
        [(0, 2**40), (0, None), (2**31, 0), (-1, 0), ("red", 0)],
        ValueError,
        "(color|key) of split must be",
        call=several,
    ),
]


MAKERS = {
    "ours": lambda world: create_communicator("naive", world),
    "inherited": lambda world: Inheriting(world.Dup()),
}


@pytest.mark.parametrize(
    ("kind", "name", "case"),
    [
        (kind, name, case)
        for case in CASES
        for name in case.names.split()
        for kind in ("ours", "inherited")
        if kind == "ours" or case.is_inherited
    ],
)
def test_what_one_rank_does_wrong_raises_on_all(world, kind, name, case):
    is_wrong = world.rank == case.rank
    with MAKERS[kind](world) as comm:
        for given in case.wrong:
            argument = case.right
            if is_wrong:
                argument = given
            with raises_on_all(is_wrong, (case.error, TypeError), case.words):
                case.call(getattr(comm, name), argument)
        assert comm.allreduce_obj(1) == comm.size
        check_mean(comm)


def test_an_object_that_one_rank_cannot_unpickle_raises_on_all(naive):
    with raises_on_all(naive.rank > 0, ValueError, "can't be unpickled"):
        naive.bcast_obj(Bomb())  # root keeps its own object
    assert naive.allreduce_obj(1) == naive.size

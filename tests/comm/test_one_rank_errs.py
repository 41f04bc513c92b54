"""What one rank does wrong is raised on all, and the communicator works afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from chainermn_comm import create_communicator
from tests.support.oracles.raised import raises_on_all
from tests.support.worlds.models import check_mean, with_grads
from tests.support.worlds.third_party import Inheriting

# A handshake comes before any algorithm is made, so names make no difference. Three
# ranks show all that two do.
pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4), pytest.mark.ranks(3)]

x = np.ones(3, "f4")
READ_ONLY = np.zeros(3, "f4")
READ_ONLY.flags.writeable = False


class Raising:
    """Raises an error when it is pickled."""

    def __init__(self, error: BaseException | type[BaseException]) -> None:
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
NO_SUMS = [np.zeros(2, dtype) for dtype in ("U3", "datetime64[D]", "V4")]
NO_SUMS += [np.rec.array([(1.0, 2)], dtype="f8,i4")]
NO_LISTS = [None, 5, {0: 1}, {1, 2, 3}, iter([]), np.array(1.0), [], [1], [1] * 9]
NO_GRADS = [np.ones(2, "i4"), np.ones(2, object), [1.0], "grad", np.ones(2, "f4,f4")]
NO_INTEGERS = (-1, 99, 1.0, None, "0", True, [0], {})


def of_each(comm: Any) -> list[Any]:
    return [x] * comm.size


@dataclass
class Case:
    """A call with what is right, and what one rank may do wrong."""

    name: str
    call: Callable[[Any, Any], Any]  # of the communicator and the argument
    right: Any  # an argument, or a function that makes it for the communicator
    wrong: Sequence[Any]
    rank: int
    error: type[BaseException]
    words: str | None
    is_inherited: bool = False  # by a third party's class, of the base


def verbs(names: str, *rest: Any) -> list[Case]:
    """The case for several methods of one argument."""
    return [
        Case(name, lambda c, it, name=name: getattr(c, name)(it), *rest)
        for name in names.split()
    ]


def roots(names: str) -> list[Case]:
    return [
        Case(
            f"root of {name}",
            lambda c, root, name=name: getattr(c, name)([1] * c.size, root=root),
            0,
            [*NO_INTEGERS],
            1,
            ValueError,
            r"rank 1.*root must be an integer",
        )
        for name in names.split()
    ]


def mean_into(comm: Any, given: tuple[Any, Any]) -> Any:
    return comm.multi_node_mean(*given)


def mean_with(comm: Any, zero_fill: Any) -> None:
    comm.multi_node_mean_grad(with_grads(w=x.copy()), zero_fill)


def mean_of(comm: Any, grad: Any) -> None:
    model = with_grads(w=x.copy())
    model["w"].grad = grad
    comm.allreduce_grad(model)


ROOM = (x, np.zeros(3, "f4"))
CASES = [
    *verbs(
        "bcast gather allgather allreduce", x, NO_ARRAYS, 0, TypeError, r"rank 0.*_obj"
    ),
    *verbs("allreduce", x, ["x"], 1, TypeError, "rank 1", True),
    *verbs("allreduce", (x, x), [(x, "x")], 1, TypeError, "rank 1", True),
    *verbs("allreduce", x, NO_SUMS, 1, TypeError, r"rank 1.*can't take the sum"),
    *verbs(
        "alltoall", of_each, NO_LISTS, 0, ValueError, r"rank 0: .*expected .*values"
    ),
    *verbs(
        "scatter scatter_obj alltoall_obj reduce_scatter",
        of_each,
        NO_LISTS,
        0,
        ValueError,
        r"rank 0: .*expected .*values",
        True,
    ),
    *verbs("bcast_obj", 1, [UNPICKLABLE], 0, RuntimeError, "can't be pickled"),
    *verbs(
        "gather_obj allreduce_obj", 1, [UNPICKLABLE], 1, RuntimeError, "can't be pickl"
    ),
    *verbs("allgather_obj", 1, [Raising(Silent)], 1, Silent, None),
    *verbs("bcast_obj", 1, [Raising(KeyboardInterrupt)], 0, KeyboardInterrupt, None),
    *roots("bcast gather scatter bcast_obj gather_obj scatter_obj"),
    Case(
        "op", lambda c, op: c.allreduce(x, op), "sum", ["mean", 1], 1, ValueError, "op"
    ),
    Case(
        "op of reduce_scatter",
        lambda c, op: c.reduce_scatter(of_each(c), op),
        "sum",
        ["mean", None],
        1,
        ValueError,
        "op .*must be one of sum, max, min",
        True,
    ),
    Case(
        "complex maximum",
        lambda c, it: c.reduce_scatter([it] * c.size, "max"),
        x,
        [x.astype("c8"), "x"],
        1,
        TypeError,
        "rank 1",
        True,
    ),
    Case("mean", mean_into, ROOM, [("x", None)], 1, TypeError, "rank 1", True),
    Case(
        "mean into",
        mean_into,
        ROOM,
        [(x, np.zeros(4, "f4")), (x, READ_ONLY), (x, [0, 0, 0])],
        1,
        ValueError,
        None,
        True,
    ),
    Case(
        "mean into another dtype",
        mean_into,
        ROOM,
        [(x, np.empty(3, dtype)) for dtype in ("i8", "?", "U3")],
        1,
        ValueError,
        "recvbuf of multi_node_mean .* can hold float32",
    ),
    Case(
        "complex mean into floats",
        mean_into,
        (x.astype("c16"), None),
        [(x.astype("c16"), np.empty(3))],
        1,
        ValueError,
        "can hold complex128",
    ),
    Case("zero_fill", mean_with, True, [Ambiguous()], 1, ValueError, "neither true"),
    Case("gradient", mean_of, x, NO_GRADS, 1, TypeError, "rank 1"),
    Case(
        "model",
        lambda c, model: c.multi_node_mean_grad(model, zero_fill=True),
        lambda _: with_grads(w=x.copy()),
        ["x"],
        1,
        AttributeError,
        "namedparams",
        True,
    ),
    Case(
        "split",
        lambda c, given: c.split(*given),
        (0, 0),
        [(0, 2**40), (0, None), (2**31, 0), (-1, 0), ("red", 0)],
        1,
        ValueError,
        "(color|key) of split must be",
    ),
]


MAKERS = {
    "ours": lambda world: create_communicator("naive", world),
    "inherited": lambda world: Inheriting(world.Dup()),
}


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, id=f"{case.name}-{kind}")
        for case in CASES
        for kind in (MAKERS if case.is_inherited else ["ours"])
    ],
)
def test_what_one_rank_does_wrong_raises_on_all(world, kind, case):
    is_wrong = world.rank == case.rank
    with MAKERS[kind](world) as comm:
        for given in case.wrong:
            with raises_on_all(is_wrong, (case.error, TypeError), case.words):
                right = case.right(comm) if callable(case.right) else case.right
                case.call(comm, given if is_wrong else right)
        assert comm.allreduce_obj(1) == comm.size
        check_mean(comm)


def test_an_object_that_one_rank_cannot_unpickle_raises_on_all(naive):
    with raises_on_all(naive.rank > 0, ValueError, "can't be unpickled"):
        naive.bcast_obj(Bomb())  # root keeps its own object
    assert naive.allreduce_obj(1) == naive.size

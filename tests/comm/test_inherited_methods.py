"""What a class of the user's inherits says and does what our own communicators do."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from chainermn_comm import RankMismatchError
from tests.support.oracles.verbs import all_of, check_one
from tests.support.worlds.third_party import Inheriting

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]


def test_every_verb_gives_what_numpy_says(world):
    """Ours in tests/gpu/test_verbs.py."""
    comm = Inheriting(world.Dup())
    for dtype in ("float32", "bool"):
        for name, (verb, _) in all_of(dtype).items():
            # Its `reduce_scatter` takes no tuples: see test_operations.py.
            if not name.startswith("reduce_scatter"):
                check_one(comm, verb, [False] * world.size, dtype, "C", None)
    assert comm.allreduce([]) == ()


x = np.ones(3, "f4")


def test_arguments_that_differ_are_told(either):
    rows = [x] * either.size
    for call in either.scatter, either.scatter_obj:
        with pytest.raises(RankMismatchError, match="root: 0 on rank 0; 1 on rank"):
            call(rows, root=min(either.rank, 1))
    is_last = either.rank == either.size - 1
    for right, wrong in [((x,), (x, x)), ((x, x), (x, x[:2]))]:
        data = right
        if is_last:
            data = wrong
        with pytest.raises(RankMismatchError, match=r"array.* on rank"):
            either.allreduce(data)
    op = "min"
    if is_last:
        op = "max"
    for call, data in ((either.allreduce, x), (either.reduce_scatter, rows)):
        with pytest.raises(RankMismatchError, match="op"):
            call(data, op)
    for root in (0, 1):
        found = either.scatter_obj("abc"[: either.size], root=root)
        assert found == "abc"[either.rank]


def test_a_mean_of_large_numbers_is_no_infinity_and_of_tiny_ones_no_zero(either):
    tiny = np.finfo("f2").smallest_subnormal
    sent = np.array([60000, tiny, 0, either.rank, np.inf], "f2")
    expected = np.array([60000, tiny, 0, (either.size - 1) / 2, np.inf], "f2")
    room = np.zeros(5, "f2")
    with np.errstate(all="raise"):
        pair = either.multi_node_mean((sent, 1.0))
        assert either.multi_node_mean(sent, room) is room
        assert either.multi_node_mean(sent, sent) is sent  # over what is sent
    assert pair[1] == 1
    for each in pair[0], room, sent:
        assert each.dtype == expected.dtype
        assert_array_equal(each, expected)

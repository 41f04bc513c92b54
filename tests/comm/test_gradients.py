"""The mean of gradients: right, the same bits everywhere, whatever the arrays look like."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 by it)
import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from chainermn_comm import RankMismatchError, create_communicator
from tests.comm.inside import no_memory_for
from tests.support.oracles.drawn_models import digest
from tests.support.oracles.raised import raises_on_all
from tests.support.plugins.pairwise import pairwise
from tests.support.worlds.models import Model, Param, with_grads
from tests.support.worlds.topologies import ALGORITHMS, by_name

pytestmark = pytest.mark.world

# Beside common shapes: 0-d, empty, one element, and sizes on both sides of each
# threshold.
SHAPES = [(), (0,), (1,), (7, 5), (4097,), (513, 515), (1 << 19,)]
# One that looks at gradients before the handshake, and one that doesn't.
before_any_data_move = pytest.mark.parametrize(
    "comm", by_name("naive", "hierarchical"), indirect=True
)
several_ranks = pytest.mark.sizes(2, 3, 4)


def values(rank, shape, dtype="f4"):
    random = default_rng([rank, *shape])
    return np.asarray(random.standard_normal(shape)).astype(dtype)


def mean_in_rank_order(rows, wire=None):
    """The sum in rank order in float32 or wider, divided, rounded to the wire's dtype and back."""
    wire = np.dtype(wire or rows[0].dtype)
    wide = np.promote_types(wire, np.dtype("f4"))
    total = rows[0].astype(wire).astype(wide)
    for row in rows[1:]:
        total = total + row.astype(wire).astype(wide)
    mean = np.asarray(total / wide.type(len(rows)))
    return mean.astype(wire).astype(rows[0].dtype)


def assert_equal_on_all_ranks(comm, model):
    mine = digest([param.grad for param in model.params.values()])
    assert comm.allgather_obj(mine) == [mine] * comm.size


def sent_as(name, own, wire):
    """How gradients travel on one machine."""
    if own.itemsize == wire.itemsize:  # neither of float16 and bfloat16 holds the other
        return own
    in_memory = name not in ("naive", "flat")  # which needn't make them narrower
    if in_memory and own.itemsize > wire.itemsize:
        return own
    return wire


@pairwise(
    name=ALGORITHMS,
    own=["float16", "float32", "float64", "bfloat16"],
    wire=[None, "float16", "float32", "float64", "bfloat16"],
)
def test_mean_is_the_sum_in_rank_order_divided(world, name, own, wire):
    travelling = dtype = np.dtype(own)  # of ml_dtypes, too
    with create_communicator(name, allreduce_grad_dtype=wire) as comm:
        if wire is not None:
            travelling = sent_as(name, dtype, np.dtype(wire))
            assert str(comm.get_config("allreduce_grad_dtype")) == wire
        # To float16 float64 goes by way of float32, which isn't to round here.
        drawn = dtype
        if travelling == "float16":
            drawn = np.dtype("float32")
        rows = [
            [values(rank, shape, drawn).astype(dtype) for shape in SHAPES]
            for rank in range(comm.size)
        ]
        grads = {str(grad.shape): grad.copy() for grad in rows[comm.rank]}
        comm.allreduce_grad(model := with_grads(**grads))
        for terms in zip(*rows, strict=True):
            grad = model[str(terms[0].shape)].grad
            expected = mean_in_rank_order(terms, travelling)
            assert grad.dtype == dtype
            # With its precision, but with more exponents.
            if travelling == "float16" != dtype:
                digits = np.frexp(grad)[0] * 2**11
                assert_array_equal(digits, np.round(digits))
                assert_allclose(grad, expected, rtol=2.0**-10, atol=2.0**-24)
            else:
                assert_array_equal(grad, expected)
        assert_equal_on_all_ranks(comm, model)


def test_a_gradient_is_overwritten_if_it_can_be_and_else_replaced(comm):
    """Other layouts are drawn in test_algorithms.py."""
    me = comm.rank
    own = values(me, (10,))
    # Ranks may differ in layout.

    def broadcast(array):
        return np.broadcast_to(array, array.shape)

    kinds = [np.asfortranarray, broadcast]
    model = with_grads(
        plain=own,
        by_rank=kinds[me % 2](values(me, (60, 50))),
        swapped=values(me, (300, 2), ">f8"),
        scalar=np.float64(me),
    )
    comm.allreduce_grad(model)
    assert_equal_on_all_ranks(comm, model)
    assert model["plain"].grad is own
    assert_array_equal(model["scalar"].grad, (comm.size - 1) / 2)
    for name, dtype in (("plain", "f4"), ("by_rank", "f4"), ("swapped", ">f8")):
        grad = model[name].grad
        rows = [values(rank, grad.shape, dtype) for rank in range(comm.size)]
        assert grad.dtype == dtype
        assert_array_equal(grad, mean_in_rank_order(rows))
        grad[...] = 0  # usable by an optimizer that works in place


def test_missing_gradients_count_as_zeros_with_zero_fill(comm):
    params = {}
    for i in range(800):  # more than fit into the first exchange
        param = Param(np.zeros(2), np.ones(2))
        if i % comm.size == comm.rank:
            param.grad = None
        params[f"p{i:04}"] = param
    model = Model(nowhere=Param(np.zeros(2)), lazy=Param(), **params)
    comm.multi_node_mean_grad(model, zero_fill=True)
    assert_equal_on_all_ranks(comm, model)
    for param in params.values():
        if comm.size > 1:
            assert_array_equal(param.grad, (comm.size - 1) / comm.size)
    comm.allreduce_grad(Model())
    comm.allreduce_grad(Model(empty=ones(0)))
    some = Model(w=ones(2), nowhere=Param(np.zeros(2)), lazy=Param())
    comm.allreduce_grad(some)
    assert_array_equal(some["w"].grad, np.ones(2))
    for each in model, some:
        assert each["nowhere"].grad is None
        assert each["lazy"].grad is None


def ones(size, dtype="f4"):
    return Param(np.ones(size, dtype), np.ones(size, dtype))


def model_of(**others):
    params = {"a": ones(2, "f8"), "b": ones(3), "c": ones(4, "f8")} | others
    return Model(**{name: param for name, param in params.items() if param})


@several_ranks
@before_any_data_move
@pytest.mark.parametrize(
    ("others", "told"),
    [
        (
            {"b": None, "b2": ones(3)},
            r"parameter: /b float32 \(3,\) on rank.*; /b2 float32",
        ),
        ({"b": ones(5)}, r"/b float32 \(3,\) on rank.*/b float32 \(5,\)"),
        ({"b": ones(3, "f8")}, r"/b float32 \(3,\) on rank.*/b float64 \(3,\)"),
        ({"b": Param(np.ones(3, "f4"))}, r"/b float32 \(3,\) no gradient"),
        ({"b": Param()}, r"/b not initialised \(bcast_data"),
        ({"c": None}, r"/c float64 \(4,\) on rank.*none on rank"),
    ],
)
def test_models_that_differ_are_told_by_parameter(comm, others, told):
    odd = comm.size - 1
    # Later a rank has packed its first gradients by the time that it is told.
    for _ in range(2):
        if comm.rank == odd:
            model = model_of(**others)
        else:
            model = model_of()
        with pytest.raises(RankMismatchError, match=told) as caught:
            comm.allreduce_grad(model)
        assert f"rank {odd}" in str(caught.value)
        comm.allreduce_grad(good := model_of())
        assert_array_equal(good["c"].grad, np.ones(4))


@several_ranks
@before_any_data_move
def test_different_settings_are_told(comm):
    if comm.rank == 0:
        comm.set_config("allreduce_grad_dtype", "float16")
    with pytest.raises(
        RankMismatchError, match="allreduce_grad_dtype: float16 on rank 0; None"
    ):
        comm.allreduce_grad(with_grads(w=np.ones(2)))
    with pytest.raises(RankMismatchError, match="zero_fill"):
        comm.multi_node_mean_grad(with_grads(w=np.ones(2)), zero_fill=comm.rank == 0)


def test_what_the_user_set_for_float_errors_changes_nothing(comm):
    tiny = 0
    if comm.rank == 0:
        tiny = np.finfo("f4").tiny
    model = with_grads(w=np.full(300_000, tiny, "f4"))
    own = np.full(9, 10.0 ** (30 - 60 * comm.rank), "f4")
    narrow = with_grads(w=own)
    with np.errstate(all="raise"):
        comm.allreduce_grad(model)
        mean = comm.multi_node_mean(np.full(300_000, tiny, "f4"))
        comm.set_config("allreduce_grad_dtype", "float16")
        comm.allreduce_grad(narrow)
    assert_array_equal(model["w"].grad, mean)
    assert mean.any()


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    "what",
    ["replaced gradients", "gradients of zeros", "room for a sum", "the first use"],
)
def test_memory_that_one_rank_lacks_is_told_on_all(world, what):
    """Before any data move, so that nobody waits and the communicator can be used on."""
    lacking = what == "the first use" or world.rank == 1  # whose making is collective
    with create_communicator("hierarchical") as comm:

        def call():
            if what == "room for a sum":
                comm.allreduce(np.ones(3, "f4"))
                return
            model = model_of()
            zero_fill = what == "gradients of zeros"
            model["b"].grad.flags.writeable = what != "replaced gradients"
            if zero_fill and comm.rank == 0:
                model["b"].grad = None
            comm.multi_node_mean_grad(model, zero_fill)

        expected = raises_on_all(lacking, MemoryError, "no room here")
        with no_memory_for(what, lacking), expected:
            call()
        call()


def test_complex_gradients_never_travel_as_floats(naive):
    model = with_grads(w=np.full(3, 1 + 2j * naive.rank, "c8"))
    naive.set_config("allreduce_grad_dtype", "float64")
    with pytest.raises(TypeError, match=f"rank {naive.rank}: parameter .*w is complex"):
        naive.allreduce_grad(model)
    naive.set_config("allreduce_grad_dtype", None)
    naive.allreduce_grad(model)
    assert_array_equal(model["w"].grad, 1 + 1j * (naive.size - 1))

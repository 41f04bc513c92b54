"""The mean of gradients: right, the same bits everywhere, whatever the arrays look like."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import ml_dtypes  # noqa: F401  (NumPy knows bfloat16 by it)
import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError, create_communicator
from tests.support.plugins.pairwise import pairwise
from tests.support.worlds.models import Model, Param, with_grads
from tests.support.worlds.shortage import no_memory_for
from tests.support.worlds.topologies import NAMES, by_name

pytestmark = pytest.mark.world

# Beside common shapes: 0-d, empty, one element, and sizes on both sides of each
# threshold.
SHAPES = [(), (0,), (3, 0, 2), (1,), (7, 5), (4096,), (4097,), (513, 515), (1 << 19,)]
# One that looks at gradients before the handshake, and one that doesn't.
before_any_data_move = pytest.mark.parametrize(
    "comm", by_name("naive", "hierarchical"), indirect=True
)
several_ranks = pytest.mark.sizes(2, 3, 4)


@cache
def drawn(rank: int, shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.array(np.random.default_rng([seed, rank, *shape]).standard_normal(shape))


def values(
    rank: int, shape: tuple[int, ...], dtype: Any = "f4", seed: int = 0
) -> np.ndarray:
    return drawn(rank, shape, seed).astype(dtype)


def mean_in_rank_order(
    rows: list[np.ndarray], wire: np.dtype | None = None
) -> np.ndarray:
    """The sum in rank order in float32 or wider, divided, rounded to the wire's dtype and back."""
    wire = np.dtype(wire or rows[0].dtype)
    wide = np.dtype("f4") if wire.itemsize == 2 else wire
    total = rows[0].astype(wire).astype(wide)
    for row in rows[1:]:
        total = total + row.astype(wire).astype(wide)
    return np.asarray(total / wide.type(len(rows))).astype(wire).astype(rows[0].dtype)


def assert_equal_on_all_ranks(comm, model) -> None:
    grads = [
        (name, param.grad)
        for name, param in model.namedparams()
        if param.grad is not None
    ]
    mine = [(name, grad.dtype.str, grad.tobytes()) for name, grad in grads]
    assert all(theirs == mine for theirs in comm.allgather_obj(mine))


def sent_as(name: str, own: np.dtype, wire: np.dtype) -> np.dtype:
    """How gradients travel on one machine."""
    if own.itemsize == wire.itemsize:  # neither of float16 and bfloat16 holds the other
        return own
    in_memory = name not in ("naive", "flat")  # which needn't make them narrower
    return own if in_memory and own.itemsize > wire.itemsize else wire


@pairwise(
    name=NAMES,
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
        drawn = "float32" if travelling == "float16" else dtype
        model, again = (
            with_grads(
                **{
                    str(s): values(comm.rank, s, drawn).astype(dtype, copy=False)
                    for s in SHAPES
                }
            )
            for _ in range(2)
        )
        comm.allreduce_grad(model)
        comm.multi_node_mean_grad(again)
        for shape in SHAPES:
            grad = model[str(shape)].grad
            rows = [
                values(rank, shape, drawn).astype(dtype) for rank in range(comm.size)
            ]
            expected = mean_in_rank_order(rows, travelling)
            assert grad.dtype == dtype
            # With its precision, but with more exponents.
            if travelling == "float16" != dtype:
                digits = np.frexp(grad)[0] * 2**11
                np.testing.assert_array_equal(digits, np.round(digits))
                np.testing.assert_allclose(grad, expected, rtol=2.0**-10, atol=2.0**-24)
            else:
                np.testing.assert_array_equal(grad, expected)
            assert again[str(shape)].grad.tobytes() == grad.tobytes()
        assert_equal_on_all_ranks(comm, model)


def odd_ones(rank: int) -> dict[str, np.ndarray]:
    """Gradients as Chainer's backward really makes them; ranks may differ in layout."""
    frozen = values(rank, (6, 8))
    frozen.flags.writeable = False
    whole = values(rank, (40,), seed=7)
    by_rank = values(rank, (600, 500))
    if rank % 2:
        by_rank = np.asfortranarray(by_rank)
    elif rank:
        by_rank.flags.writeable = False
    return {
        "stride0": np.broadcast_to(np.float32(rank + 1), (5, 4)),
        "frozen": frozen,
        "transposed": values(rank, (8, 6), seed=1).T,
        "sliced": values(rank, (6, 16), seed=2)[:, ::2],
        "fortran": np.asfortranarray(values(rank, (300, 200), seed=3)),
        "left": whole[:20],
        "right": whole[20:],
        "overlapping": whole[10:30],
        "the_same": whole[10:30],
        "by_rank": by_rank,
        "plain": values(rank, (10,)),
        **{
            dtype: values(rank, (300, 2), dtype)
            for dtype in ("float16", "float64", ">f8")
        },
    }


def test_odd_layouts_and_mixed_dtypes_are_averaged_too_and_results_stay_apart(comm):
    grads = odd_ones(comm.rank)
    model = with_grads(**grads, scalar=np.float64(comm.rank))
    comm.allreduce_grad(model)
    assert_equal_on_all_ranks(comm, model)
    assert model["plain"].grad is grads["plain"]  # in place, since it is writable
    np.testing.assert_array_equal(
        model.params.pop("scalar").grad, np.array((comm.size - 1) / 2)
    )
    for name, param in model.params.items():
        rows = [odd_ones(rank)[name] for rank in range(comm.size)]
        assert param.grad.dtype == rows[0].dtype
        np.testing.assert_array_equal(
            param.grad, mean_in_rank_order(rows), err_msg=name
        )
        param.grad[...] = 0  # usable by an optimizer that works in place


def test_means_neither_overflow_nor_lose_infinities_and_nans(comm):
    """A mean of float16 that can be represented does not overflow, whatever its sum."""
    high = np.finfo("float16").max
    largest = np.array([high, 1, -high, high / 2], "float16")
    odd = np.array([1, 2, 3, 4], "float32")
    if comm.rank == comm.size - 1:
        odd[1:] = np.inf, -np.inf, np.nan
    model = with_grads(odd=odd, largest=largest.copy())
    comm.allreduce_grad(model)
    np.testing.assert_array_equal(model["odd"].grad, [1, np.inf, -np.inf, np.nan])
    eps = np.finfo("float16").eps
    np.testing.assert_allclose(model["largest"].grad, largest, rtol=4 * eps)


def test_missing_gradients_count_as_zeros_with_zero_fill(comm):
    mine = None if comm.rank else np.full(6, 3, "float32")
    params = {
        f"p{i:04}": Param(
            np.zeros(2), None if i % comm.size == comm.rank else np.ones(2)
        )
        for i in range(800)  # more than fit into the first exchange
    }
    model = Model(
        w=Param(np.zeros(6, "float32"), mine), v=Param(np.zeros(2, "float32")), **params
    )
    comm.multi_node_mean_grad(model, zero_fill=True)
    np.testing.assert_allclose(model["w"].grad, np.full(6, 3 / comm.size), rtol=1e-6)
    assert model["v"].grad is None  # missing everywhere
    assert_equal_on_all_ranks(comm, model)
    expected = None if comm.size == 1 else [(comm.size - 1) / comm.size] * 2
    for param in params.values():
        np.testing.assert_equal(param.grad, expected)
    nothing = Model(w=Param(np.zeros(2)), lazy=Param())
    comm.multi_node_mean_grad(nothing, zero_fill=True)
    comm.allreduce_grad(Model())
    comm.allreduce_grad(Model(empty=ones(0)))
    comm.allreduce_grad(some := Model(w=ones(2), v=Param(np.zeros(2)), lazy=Param()))
    np.testing.assert_array_equal(some["w"].grad, np.ones(2))
    for param in (*nothing.params.values(), some["v"], some["lazy"]):
        assert param.grad is None


def ones(size: int, dtype: str = "f4") -> Param:
    return Param(np.ones(size, dtype), np.ones(size, dtype))


def model_of(**others: Param | None) -> Model:
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
        model = model_of(**others) if comm.rank == odd else model_of()
        with pytest.raises(RankMismatchError, match=told) as caught:
            comm.allreduce_grad(model)
        assert f"rank {odd}" in str(caught.value)
        comm.allreduce_grad(good := model_of())
        np.testing.assert_array_equal(good["c"].grad, np.ones(4))


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
    tiny = np.finfo("float32").tiny
    mine = np.full(300_000, tiny if comm.rank == 0 else 0, "float32")
    with np.errstate(all="raise"):
        model = with_grads(w=mine.copy())
        comm.allreduce_grad(model)
        comm.set_config("allreduce_grad_dtype", "float16")
        narrow = with_grads(w=np.full(9, 1e-30 if comm.rank == 0 else 1e30, "float32"))
        comm.allreduce_grad(narrow)
        comm.multi_node_mean(mine)
        comm.allreduce(mine)
    np.testing.assert_allclose(
        model["w"].grad, np.full(300_000, tiny / comm.size), rtol=1e-5
    )


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    "what",
    ["replaced gradients", "gradients of zeros", "room for a sum", "the first use"],
)
def test_memory_that_one_rank_lacks_is_told_on_all(world, what):
    """Before any data move, so that nobody waits and the communicator can be used on."""
    lacking = what == "the first use" or world.rank == 1  # whose making is collective
    with create_communicator("hierarchical") as comm:

        def call() -> None:
            if what == "room for a sum":
                comm.allreduce(np.ones(3, "f4"))
                return
            model, zero_fill = model_of(), what == "gradients of zeros"
            model["b"].grad.flags.writeable = what != "replaced gradients"
            if zero_fill and comm.rank == 0:
                model["b"].grad = None
            comm.multi_node_mean_grad(model, zero_fill)

        expected = pytest.raises(
            MemoryError if lacking else PeerError, match="no room here"
        )
        with no_memory_for(what, lacking), expected:
            call()
        call()


def test_complex_gradients_never_travel_as_floats(world):
    with create_communicator("hierarchical") as comm:
        model = with_grads(w=np.full(3, 1 + 2j * comm.rank, "c8"))
        for wire in ("float16", "float64", "bfloat16"):
            comm.set_config("allreduce_grad_dtype", wire)
            with pytest.raises(
                TypeError, match=f"rank {comm.rank}: parameter .*w is complex"
            ):
                comm.allreduce_grad(model)
        comm.set_config("allreduce_grad_dtype", None)
        comm.allreduce_grad(model)
        np.testing.assert_array_equal(
            model["w"].grad, np.full(3, 1 + 1j * (comm.size - 1), "c8")
        )


@pytest.mark.sizes(1, 2)
def test_a_model_may_have_attributes_of_any_name(world):
    """Only ``namedparams`` is the library's."""
    with create_communicator("naive") as comm:
        for name, value in [
            ("sorted_names", ["nothing"]),
            ("sorted_names", ()),
            ("params", lambda: 1 / 0),
            ("takes_plans", True),
            ("grads", None),
        ]:
            model = with_grads(w=np.full(3, comm.rank, "f4"), v=np.ones(2, "f4"))
            named = list(model.namedparams())
            given = SimpleNamespace(namedparams=lambda found=named: iter(found))
            vars(given).update({"params": None, name: value})
            comm.allreduce_grad(given)
            np.testing.assert_array_equal(model["w"].grad, (comm.size - 1) / 2)
            model["w"].data[...] = comm.rank
            comm.bcast_data(given)
            np.testing.assert_array_equal(model["w"].data, 0)

"""The mean of gradients: right, the same bits everywhere, whatever the arrays look like."""

from __future__ import annotations

import numpy as np
import pytest

from chainermn_comm import PeerError, RankMismatchError, create_communicator
from tests.support.models import Model, Param, with_grads
from tests.support.topologies import NAMES

pytestmark = pytest.mark.world

# On one machine these send nothing, and cast to no wire dtype that is narrower.
IN_MEMORY = ("hierarchical", "two_dimensional", "single_node", "non_cuda_aware")
# Beside common shapes: 0-d, empty, one element, and sizes on both sides of each threshold.
SHAPES = [(), (0,), (3, 0, 2), (1,), (7, 5), (4096,), (4097,), (513, 515), (1 << 19,)]


def values(rank: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, rank, *shape])
    return np.array(rng.standard_normal(shape)).astype(dtype)


def expected_mean(size: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """The sum in rank order in float32 or wider, divided, rounded."""
    wide = np.promote_types(dtype, "float32")
    total = values(0, shape, dtype, seed).astype(wide)
    for rank in range(1, size):
        total = total + values(rank, shape, dtype, seed)
    return np.asarray(total / wide.type(size)).astype(dtype)


def assert_equal_on_all_ranks(comm, model) -> None:
    grads = [(name, param.grad) for name, param in model.namedparams() if param.grad is not None]
    mine = [(name, grad.dtype.str, grad.tobytes()) for name, grad in grads]
    assert all(theirs == mine for theirs in comm.allgather_obj(mine))


@pytest.mark.parametrize("method", ["allreduce_grad", "multi_node_mean_grad"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_mean_is_the_sum_in_rank_order_divided(comm, method, dtype):
    model = with_grads(**{f"p{i}": values(comm.rank, s, dtype) for i, s in enumerate(SHAPES)})
    getattr(comm, method)(model)
    for i, shape in enumerate(SHAPES):
        grad = model[f"p{i}"].grad
        assert grad.dtype == dtype
        np.testing.assert_array_equal(grad, expected_mean(comm.size, shape, dtype))
    assert_equal_on_all_ranks(comm, model)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_travel_as_bfloat16(world, name, dtype):
    from ml_dtypes import bfloat16

    own = np.dtype(bfloat16 if dtype == "bfloat16" else dtype)
    # Neither of float16 and bfloat16 holds the other.
    wire = own if name in IN_MEMORY or own.itemsize == 2 else np.dtype(bfloat16)
    with create_communicator(name, allreduce_grad_dtype="bfloat16") as comm:
        every = [[values(r, shape, "f4").astype(own) for shape in SHAPES] for r in range(comm.size)]
        model = with_grads(**{f"p{i}": grad for i, grad in enumerate(every[comm.rank])})
        originals = [[grad.astype(wire) for grad in grads] for grads in every]
        wide = np.dtype("f8" if wire == "f8" else "f4")
        comm.allreduce_grad(model)
        for i in range(len(SHAPES)):
            total = originals[0][i].astype(wide)
            for grads in originals[1:]:
                total = total + grads[i].astype(wide)
            expected = np.asarray(total / wide.type(comm.size)).astype(wire).astype(own)
            assert model[f"p{i}"].grad.dtype == own
            np.testing.assert_array_equal(model[f"p{i}"].grad, expected)


def test_mixed_dtypes_in_one_model(comm):
    dtypes = ["float16", "float64", "float32"] * 3
    model = with_grads(
        **{f"p{i}": values(comm.rank, (300, i + 1), dtype, i) for i, dtype in enumerate(dtypes)}
    )
    comm.allreduce_grad(model)
    for i, dtype in enumerate(dtypes):
        expected = expected_mean(comm.size, (300, i + 1), dtype, i)
        np.testing.assert_array_equal(model[f"p{i}"].grad, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wire", ["float16", "float32", "float64"])
def test_gradients_travel_in_the_wire_dtype(name, wire):
    sent_as = "float32" if wire == "float16" and name in IN_MEMORY else wire
    shapes = [(), (0,), (50,), (600, 600)]
    with create_communicator(name, allreduce_grad_dtype=wire) as comm:
        assert comm.get_config("allreduce_grad_dtype") == np.dtype(wire)
        model = with_grads(
            **{f"p{i}": values(comm.rank, s, "float32") for i, s in enumerate(shapes)}
        )
        comm.allreduce_grad(model)
        wide = np.promote_types(wire, "float32")
        for i, shape in enumerate(shapes):
            rows = [values(r, shape, "float32").astype(sent_as) for r in range(comm.size)]
            total = rows[0].astype(wide)
            for row in rows[1:]:
                total = total + row
            expected = np.asarray(total / wide.type(comm.size)).astype(sent_as).astype("float32")
            if comm.size == 1:  # even alone
                expected = rows[0].astype("float32")
            grad = model[f"p{i}"].grad
            if sent_as == "float16":  # with float16's precision, but with more exponents
                assert not np.any(grad.view("u4") & 0x1FFF)
                np.testing.assert_allclose(grad, expected, rtol=2.0**-10, atol=2.0**-24)
            else:
                np.testing.assert_array_equal(grad, expected)


def odd_layouts(rank: int) -> dict[str, np.ndarray]:
    """Gradients as Chainer's backward really makes them."""
    base = values(rank, (6, 8), "float32")
    frozen = base.copy()
    frozen.flags.writeable = False
    whole = values(rank, (40,), "float32", 7)
    return {
        "stride0": np.broadcast_to(np.float32(rank + 1), (5, 4)),
        "frozen": frozen,
        "transposed": values(rank, (8, 6), "float32", 1).T,
        "sliced": values(rank, (6, 16), "float32", 2)[:, ::2],
        "fortran": np.asfortranarray(values(rank, (300, 200), "float32", 3)),
        "left": whole[:20],
        "right": whole[20:],
        "overlapping": whole[10:30],
    }


def test_odd_layouts_are_averaged_too(comm):
    model = with_grads(**odd_layouts(comm.rank))
    comm.allreduce_grad(model)
    for name, param in model.params.items():
        rows = [odd_layouts(rank)[name] for rank in range(comm.size)]
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        np.testing.assert_array_equal(param.grad, total / np.float32(comm.size), err_msg=name)
        param.grad[...] = 0  # usable by an optimizer that works in place
    assert_equal_on_all_ranks(comm, model)


def test_a_gradient_that_two_parameters_share_stays_theirs_apart(comm):
    shared = values(comm.rank, (30,), "float32")
    model = with_grads(a=shared, b=shared)
    comm.allreduce_grad(model)
    for name in "ab":
        np.testing.assert_array_equal(model[name].grad, expected_mean(comm.size, (30,), "float32"))
    model["a"].grad += 1
    np.testing.assert_array_equal(model["b"].grad, expected_mean(comm.size, (30,), "float32"))


def test_ranks_may_differ_in_layout(comm):
    mine = values(comm.rank, (600, 500), "float32")
    if comm.rank % 2:
        mine = np.asfortranarray(mine)
    elif comm.rank:
        mine.flags.writeable = False
    model = with_grads(w=mine)
    comm.allreduce_grad(model)
    np.testing.assert_array_equal(model["w"].grad, expected_mean(comm.size, (600, 500), "float32"))


def test_a_writable_gradient_is_averaged_in_place(comm):
    grad = values(comm.rank, (10,), "float32")
    model = with_grads(w=grad)
    comm.allreduce_grad(model)
    assert model["w"].grad is grad


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_mean_that_can_be_represented_does_not_overflow(comm, dtype):
    largest = np.finfo(dtype).max
    model = with_grads(w=np.array([largest, 1, -largest, largest / 2], dtype))
    comm.allreduce_grad(model)
    np.testing.assert_allclose(
        model["w"].grad, [largest, 1, -largest, largest / 2], rtol=4 * np.finfo(dtype).eps
    )


def test_infinities_and_nans_come_through(comm):
    mine = np.array([1, 2, 3, 4], "float32")
    if comm.rank == comm.size - 1:
        mine[1:] = np.inf, -np.inf, np.nan
    model = with_grads(w=mine)
    comm.allreduce_grad(model)
    np.testing.assert_array_equal(model["w"].grad, [1, np.inf, -np.inf, np.nan])


def test_missing_gradients_count_as_zeros_with_zero_fill(comm):
    mine = None if comm.rank else np.full(6, 3, "float32")
    model = Model(w=Param(np.zeros(6, "float32"), mine), v=Param(np.zeros(2, "float32"), None))
    comm.multi_node_mean_grad(model, zero_fill=True)
    np.testing.assert_allclose(model["w"].grad, np.full(6, 3 / comm.size), rtol=1e-6)
    assert model["v"].grad is None  # missing everywhere
    assert_equal_on_all_ranks(comm, model)


def test_many_missing_gradients(comm):
    count = 1500
    model = Model(
        **{
            f"p{i:04}": Param(np.zeros(2), None if i % comm.size == comm.rank else np.ones(2))
            for i in range(count)
        }
    )
    comm.multi_node_mean_grad(model, zero_fill=True)
    expected = None if comm.size == 1 else np.full(2, (comm.size - 1) / comm.size)
    for param in model.params.values():
        if expected is None:
            assert param.grad is None
        else:
            np.testing.assert_allclose(param.grad, expected)


def test_without_zero_fill_a_gradient_missing_everywhere_is_left_alone(comm):
    model = Model(w=Param(np.zeros(2), np.ones(2)), v=Param(np.zeros(2), None), lazy=Param())
    comm.allreduce_grad(model)
    np.testing.assert_array_equal(model["w"].grad, np.ones(2))
    assert model["v"].grad is None
    assert model["lazy"].data is None


def test_models_without_gradients_or_parameters(comm):
    comm.allreduce_grad(Model())
    comm.multi_node_mean_grad(Model(w=Param(np.zeros(2))), zero_fill=True)


def unlike_others(difference: str) -> Model:
    model = with_grads(a=np.ones(2), b=np.ones(3, "float32"), c=np.ones(4))
    if difference == "name":
        model.params["b2"] = model.params.pop("b")
    elif difference == "shape":
        model.params["b"] = Param(np.ones(5, "float32"), np.ones(5, "float32"))
    elif difference == "dtype":
        model.params["b"] = Param(np.ones(3), np.ones(3))
    elif difference == "gradient":
        model["b"].grad = None
    elif difference == "uninitialised":
        model.params["b"] = Param()
    elif difference == "fewer":
        del model.params["c"]
    return model


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("difference", "told"),
    [
        ("name", r"parameter: /b float32 \(3,\) on rank.*; /b2 float32 \(3,\) on rank"),
        ("shape", r"/b float32 \(3,\) on rank.*/b float32 \(5,\)"),
        ("dtype", r"/b float32 \(3,\) on rank.*/b float64 \(3,\)"),
        ("gradient", r"/b float32 \(3,\) no gradient"),
        ("uninitialised", r"/b not initialised \(bcast_data"),
        ("fewer", r"/c float64 \(4,\) on rank.*none on rank"),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["at first", "later"])
def test_models_that_differ_are_told_by_parameter(comm, difference, told, first):
    """Later, a rank has packed its first gradients by the time that it is told."""
    if not first:
        comm.allreduce_grad(unlike_others("nothing"))
    odd = comm.size - 1
    model = unlike_others(difference if comm.rank == odd else "nothing")
    with pytest.raises(RankMismatchError, match=told) as caught:
        comm.allreduce_grad(model)
    assert f"rank {odd}" in str(caught.value)
    good = unlike_others("nothing")
    comm.allreduce_grad(good)
    np.testing.assert_array_equal(good["c"].grad, np.ones(4))


@pytest.mark.sizes(2, 3, 4)
def test_different_settings_are_told(comm):
    if comm.rank == 0:
        comm.set_config("allreduce_grad_dtype", "float16")
    with pytest.raises(RankMismatchError, match="allreduce_grad_dtype: float16 on rank 0; None"):
        comm.allreduce_grad(with_grads(w=np.ones(2)))
    with pytest.raises(RankMismatchError, match="zero_fill"):
        comm.multi_node_mean_grad(with_grads(w=np.ones(2)), zero_fill=comm.rank == 0)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("bad", [np.ones(2, "int32"), np.ones(2, object), [1.0, 2.0], "grad"])
def test_what_is_no_float_gradient_raises_on_all(comm, bad):
    wrong = comm.rank == 1
    model = Model(w=Param(np.ones(2), bad if wrong else np.ones(2)))
    with pytest.raises(TypeError if wrong else PeerError, match="rank 1"):
        comm.allreduce_grad(model)
    with pytest.raises(TypeError if wrong else PeerError, match="namedparams"):
        comm.allreduce_grad(object() if wrong else with_grads(w=np.ones(2)))
    comm.allreduce_grad(with_grads(w=np.ones(2)))


def test_back_to_back_calls_do_not_mix(comm):
    sizes = [1, 100, 5000, 300_000]
    models = [with_grads(w=values(comm.rank, (n,), "float32")) for n in sizes]
    expected = [expected_mean(comm.size, (n,), "float32") for n in sizes]
    for _ in range(20):
        for n, model, mean in zip(sizes, models, expected, strict=True):
            model["w"].grad[...] = values(comm.rank, (n,), "float32")
            comm.allreduce_grad(model)
            np.testing.assert_array_equal(model["w"].grad, mean)


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
    np.testing.assert_allclose(model["w"].grad, np.full(300_000, tiny / comm.size), rtol=1e-5)


def test_foreign_byte_order_is_kept(comm):
    model = with_grads(w=values(comm.rank, (5000,), ">f8"))
    comm.allreduce_grad(model)
    assert model["w"].grad.dtype == ">f8"
    np.testing.assert_allclose(model["w"].grad, expected_mean(comm.size, (5000,), ">f8"))


def test_a_scalar_gradient_becomes_an_array(comm):
    model = Model(w=Param(np.zeros(()), np.float64(comm.rank)))
    comm.allreduce_grad(model)
    np.testing.assert_array_equal(model["w"].grad, np.array((comm.size - 1) / 2))


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("verb", ["replaced", "zeros", "allreduce", "first use"])
def test_memory_that_one_rank_lacks_is_told_on_all(world, monkeypatch, verb):
    """Before any data move, so that nobody waits and the communicator can be used on."""
    from chainermn_comm import allreduce, gradients, plans

    def fail(*_, **__):
        raise MemoryError("no room here")

    where = {
        "replaced": (gradients, "_targets"),
        "zeros": (gradients, "_zeros"),
        "allreduce": (allreduce, "_copied"),
        "first use": (plans, "_through_nodes"),
    }
    with create_communicator("hierarchical") as comm:

        def call() -> None:
            if verb == "allreduce":
                comm.allreduce(np.ones(3, "f4"))
            else:
                grad = None if verb == "zeros" and comm.rank == 0 else np.ones(3, "f4")
                if verb == "replaced":
                    grad.flags.writeable = False
                model = Model(w=Param(np.ones(3, "f4"), grad))
                comm.multi_node_mean_grad(model, verb == "zeros")

        if verb == "first use" or comm.rank == 1:  # whose making is collective
            monkeypatch.setattr(*where[verb], fail)
        expected = MemoryError if verb == "first use" or comm.rank == 1 else PeerError
        with pytest.raises(expected, match="no room here"):
            call()
        monkeypatch.undo()
        call()


@pytest.mark.parametrize("wire", ["float16", "float64", "bfloat16"])
def test_complex_gradients_never_travel_as_floats(world, wire):
    with create_communicator("hierarchical") as comm:
        model = with_grads(w=np.full(3, 1 + 2j * comm.rank, "c8"))
        comm.set_config("allreduce_grad_dtype", wire)
        with pytest.raises(TypeError, match=f"rank {comm.rank}: parameter .*w is complex"):
            comm.allreduce_grad(model)
        comm.set_config("allreduce_grad_dtype", None)
        comm.allreduce_grad(model)
        np.testing.assert_array_equal(model["w"].grad, np.full(3, 1 + 1j * (comm.size - 1), "c8"))


def test_structured_gradients_are_refused_by_name(world):
    with (
        create_communicator("flat") as comm,
        pytest.raises(TypeError, match=r"parameter .*w has dtype .*, expected a float"),
    ):
        comm.allreduce_grad(with_grads(w=np.zeros(3, [("a", "f4"), ("b", "f4")])))

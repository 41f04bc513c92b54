"""Column- and row-parallel `Linear` against `Linear` in one process, from the same seed."""

from __future__ import annotations

import copy
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Variable

from chainermn_comm import PeerError, RankMismatchError
from chainermn_modelparallel import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.world

TOLERANCE = {np.float16: 1e-2, np.float32: 1e-5, np.float64: 1e-12}
EACH = pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])


@pytest.fixture(params=TOLERANCE)
def dtype(request):
    with chainer.using_config("dtype", request.param):
        yield request.param


def both(kind: type, comm: Any, nobias: bool = False) -> tuple[Any, Any]:
    """The parallel link and the whole one, drawn from the same seed; sizes don't divide by 2."""
    np.random.seed(7)
    link = kind(7, 5, comm, nobias=nobias, initial_bias=chainer.initializers.Normal())
    np.random.seed(7)
    return link, L.Linear(
        7, 5, nobias=nobias, initial_bias=chainer.initializers.Normal()
    )


def part(comm: Any, size: int) -> slice:
    """This rank's part, told independently."""
    rows = np.array_split(np.arange(size), comm.size)[comm.rank]
    return slice(rows[0], rows[-1] + 1)


def part_of_weights(kind: type, comm: Any) -> tuple[slice, slice]:
    columns = kind is ColumnParallelLinear
    return (part(comm, 5), slice(None)) if columns else (slice(None), part(comm, 7))


@pytest.mark.parametrize("nobias", [False, True])
@EACH
def test_values_and_gradients_are_those_of_one_process(
    comm, random, kind, nobias, dtype
):
    link, alone = both(kind, comm, nobias)
    rows = part_of_weights(kind, comm)
    np.testing.assert_array_equal(link.W.array, alone.W.array[rows])
    data = random.standard_normal((3, 7)).astype(dtype)
    weights = random.standard_normal((3, 5)).astype(dtype)
    x, mine = Variable(data), Variable(data)
    for model, variable in ((alone, x), (link, mine)):
        model.cleargrads()
        y = model(variable)
        F.sum(y * y * weights).backward()

    def close(actual: np.ndarray, desired: np.ndarray) -> None:
        assert actual.dtype == desired.dtype
        tolerance = TOLERANCE[dtype]
        scale = max(1, np.abs(desired).max())
        np.testing.assert_allclose(
            actual, desired, rtol=tolerance, atol=tolerance * scale
        )

    with chainer.no_backprop_mode():
        close(link(data).array, alone(data).array)
    close(mine.grad, x.grad)
    close(link.W.grad, alone.W.grad[rows])
    if nobias:
        assert link.b is None
    else:
        np.testing.assert_array_equal(link.b.array, alone.b.array[rows[0]])
        close(link.b.grad, alone.b.grad[rows[0]])


@pytest.mark.parametrize("gathered", [False, True])
def test_a_pair_is_differentiated_twice_as_in_one_process(comm, random, gathered):
    """Megatron's pair: columns, an activation, rows; it needs no gathering between."""
    with chainer.using_config("dtype", np.float64):
        np.random.seed(3)
        alone = L.Linear(4, 9), L.Linear(9, 2)
        np.random.seed(3)
        first = ColumnParallelLinear(4, 9, comm, gather_output=gathered)
        second = RowParallelLinear(9, 2, comm, input_is_parallel=not gathered)
    rows, every = part(comm, 9), slice(None)
    data = random.standard_normal((3, 4))
    assert first(data).shape == (3, 9 if gathered else rows.stop - rows.start)
    x, mine = Variable(data), Variable(data)
    for order in (1, 2):
        for links, variable in ((alone, x), ((first, second), mine)):
            chainer.ChainList(*links).cleargrads()
            variable.cleargrad()
            loss = F.sum(links[1](F.tanh(links[0](variable))) ** 3)
            if order == 2:
                (gx,) = chainer.grad([loss], [variable], enable_double_backprop=True)
                loss = F.sum(F.sin(gx))
            loss.backward()
        for actual, desired, its in (
            (mine, x, every),
            (first.W, alone[0].W, rows),
            (first.b, alone[0].b, rows),
            (second.W, alone[1].W, (every, rows)),
            (second.b, alone[1].b, every),
        ):
            np.testing.assert_allclose(
                actual.grad, desired.grad[its], rtol=1e-11, atol=1e-11
            )


@EACH
def test_copies_and_snapshots_hold_a_ranks_own_part(comm, random, tmp_path, kind):
    link, alone = both(kind, comm)
    fresh, file = kind(7, 5, comm), tmp_path / f"rank-{comm.rank}.npz"
    chainer.serializers.save_npz(file, link)
    chainer.serializers.load_npz(file, fresh)
    taken_over = kind(7, 5, comm, initialW=alone.W.array, initial_bias=alone.b.array)
    x = random.standard_normal((2, 7)).astype("f")
    for each in (
        fresh,
        taken_over,
        copy.deepcopy(link),
        link.copy("copy"),
        link.copy("share"),
    ):
        assert each.comm is comm
        np.testing.assert_array_equal(each(x).array, link(x).array)
    np.random.seed(11)
    drawn = link.copy("init")
    np.random.seed(11)
    whole = L.Linear(7, 5).W.array
    np.testing.assert_array_equal(drawn.W.array, whole[part_of_weights(kind, comm)])


@EACH
def test_a_wrong_input_on_one_rank_raises_on_all(comm, kind):
    link, _ = both(kind, comm)
    good = np.ones((2, 7), "f")
    for wrong, error, text in (
        (None, TypeError, "got NoneType"),
        (
            np.ones((2, 6), "f"),
            ValueError,
            r"matrix of 7 columns of float32, got float32 \(2, 6\)",
        ),
        (np.ones((2, 7), "d"), ValueError, "got float64"),
        (np.ones(7, "f"), ValueError, r"got float32 \(7,\)"),
        (chainer.Parameter(), ValueError, "got a parameter that is not initialised"),
    ):
        with pytest.raises(error if comm.rank == 0 else PeerError, match=text):
            link(wrong if comm.rank == 0 else good)
    parallel = RowParallelLinear(7, 5, comm, input_is_parallel=True)
    with pytest.raises((ValueError, PeerError), match=r"got float32 \(2, 99\)"):
        parallel(np.ones((2, 99 if comm.rank == 0 else parallel.W.shape[1]), "f"))
    link(good)


@pytest.mark.sizes(2, 3, 4)
@EACH
def test_batches_that_differ_raise_on_all(comm, kind):
    link, _ = both(kind, comm)
    with pytest.raises(
        RankMismatchError, match=r"float32 \(2, 7\) on rank 0; float32 \(3, 7\)"
    ):
        link(np.ones((2 if comm.rank == 0 else 3, 7), "f"))


def test_wrong_sizes_raise(comm):
    assert RowParallelLinear(np.int64(8), np.int32(3), comm).W.shape[0] == 3
    with pytest.raises(TypeError, match="comm must be a communicator"):
        ColumnParallelLinear(3, 3, None)
    for wrong in (None, 0, "3", 2.0):
        with pytest.raises(ValueError, match="in_size must be an integer"):
            ColumnParallelLinear(wrong, comm.size, comm)
        with pytest.raises(ValueError, match="one for each rank, got"):
            RowParallelLinear(wrong, 3, comm)


@EACH
@pytest.mark.parametrize("shape", [(3, 7, 1), (2, 1, 7, 1)])
def test_further_axes_are_flattened(comm, random, kind, shape):
    link, alone = both(kind, comm)
    data = random.standard_normal(shape).astype("f")
    x, mine = Variable(data), Variable(data)
    for model, variable in ((alone, x), (link, mine)):
        y = model(variable)
        assert y.shape == (shape[0], 5)
        F.sum(y * y).backward()
    np.testing.assert_allclose(mine.grad, x.grad, rtol=1e-4, atol=1e-5)

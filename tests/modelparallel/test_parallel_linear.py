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

from chainermn_comm import PeerError, RankMismatchError, global_norm
from chainermn_modelparallel import (
    ColumnParallelLinear,
    MultiNodeChainList,
    RowParallelLinear,
    create_multi_node_n_step_rnn,
)
from chainermn_train import create_multi_node_optimizer

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
    loaded = kind(7, 5, comm)
    file = tmp_path / f"rank-{comm.rank}.npz"
    chainer.serializers.save_npz(file, link)
    chainer.serializers.load_npz(file, loaded)
    taken_over = kind(7, 5, comm, initialW=alone.W.array, initial_bias=alone.b.array)
    x = random.standard_normal((2, 7)).astype("f")
    for each in (loaded, taken_over, copy.deepcopy(link), link.copy("copy")):
        assert each.comm is comm
        np.testing.assert_array_equal(each(x).array, link(x).array)
    np.random.seed(11)
    drawn = link.copy("init")
    np.random.seed(11)
    whole = L.Linear(7, 5).W.array
    np.testing.assert_array_equal(drawn.W.array, whole[part_of_weights(kind, comm)])


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (None, TypeError, "got NoneType"),
        (
            np.ones((2, 99), "f"),
            ValueError,
            r"matrix of \d columns of float32, got float32 \(2, 99\)",
        ),
        (np.ones((2, 7), "d"), ValueError, "got float64"),
        (np.ones(7, "f"), ValueError, r"got float32 \(7,\)"),
    ],
)
@pytest.mark.parametrize("kind", ["columns", "rows", "own rows"])
def test_a_wrong_input_on_one_rank_raises_on_all(comm, kind, wrong, error, text):
    if kind == "columns":
        link = ColumnParallelLinear(7, 5, comm)
    else:
        link = RowParallelLinear(7, 5, comm, input_is_parallel=kind == "own rows")
    right = np.ones((2, link.W.shape[1] if kind == "own rows" else 7), "f")
    with pytest.raises(error if comm.rank == 0 else PeerError, match=text):
        link(wrong if comm.rank == 0 else right)
    link(right)


@pytest.mark.sizes(2, 3, 4)
@EACH
def test_batches_that_differ_raise_on_all(comm, kind):
    link, _ = both(kind, comm)
    text = r"float32 \(2, 7\) on rank 0; float32 \(3, 7\)"
    with pytest.raises(RankMismatchError, match=text):
        link(np.ones((2 if comm.rank == 0 else 3, 7), "f"))


def test_wrong_sizes_raise(comm):
    with pytest.raises(TypeError, match="comm must be a communicator"):
        ColumnParallelLinear(3, 3, None)
    for wrong in (None, 0, 2.0):
        with pytest.raises(ValueError, match="in_size must be an integer"):
            ColumnParallelLinear(wrong, comm.size, comm)
    with pytest.raises(ValueError, match=r"at least .*one for each rank.*, got 0"):
        RowParallelLinear(0, 3, comm)


class Model(chainer.Chain):
    """Plain links around the two parallel ones; all ranks seed it alike."""

    def __init__(self, comm: Any, seed: int = 0) -> None:
        super().__init__()
        np.random.seed(seed)
        with self.init_scope():
            self.first = L.Linear(6, 6)
            self.hidden = ColumnParallelLinear(6, 8, comm, gather_output=False)
            self.output = RowParallelLinear(8, 5, comm, input_is_parallel=True)
            self.last = L.Linear(5, 2)

    def forward(self, x: Any) -> Variable:
        h = F.tanh(self.output(F.tanh(self.hidden(self.first(x)))))
        return F.sum(self.last(h) ** 2)


def trained(comm: Any, x: np.ndarray, change: Any = None) -> Model:
    """A model after one update, in which `change` may have spoilt what ranks have alike."""
    model = Model(comm)
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    if change is not None:
        change(optimizer)
    optimizer.update(model, x)
    return model


def clip(optimizer: Any) -> None:
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.1))


def freeze(path: str) -> Any:
    """A change that lets one rank alone keep a parameter that all ranks have alike."""

    def change(optimizer: Any) -> None:
        if optimizer.target.hidden.comm.rank == 0:
            param = dict(optimizer.target.namedparams())[path]
            param.update_rule.enabled = False

    return change


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    "change", [clip, freeze("/first/W"), freeze("/last/W"), freeze("/output/b")]
)
def test_replicas_that_part_raise_at_the_next_step_on_all_ranks(comm, random, change):
    x = random.standard_normal((3, 6)).astype("f")
    model = trained(comm, x, change)
    with pytest.raises(RankMismatchError, match="MultiNodeGradientClipping"):
        model(x).backward()
    assert ColumnParallelLinear(6, 8, comm, initialW=1)(x).shape == (3, 8)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    "spoil", [np.zeros_like, lambda x: x[::-1], lambda x: x * 1.01]
)
def test_inputs_that_differ_raise_on_all_ranks(comm, random, spoil):
    model = Model(comm)
    x = random.standard_normal((3, 6)).astype("f")
    with pytest.raises(RankMismatchError, match="the same inputs"):
        model(spoil(x) if comm.rank == 0 else x)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.0])
def test_the_same_values_are_no_difference_nor_is_rounding(comm, value):
    x = np.full((3, 6), value, "f")
    with np.errstate(all="ignore"):
        model = trained(comm, x)
        x[comm.rank % 3, 0] *= np.float32(1 + 2e-7)
        loss = model(x)
        loss.backward()
    np.testing.assert_equal(np.isfinite(loss.array), value == 1.0)


@pytest.mark.sizes(2, 3, 4)
@EACH
def test_unseeded_ranks_raise_unless_they_load_their_part(comm, tmp_path, kind):
    np.random.seed(comm.rank)
    link = kind(6, 6, comm)
    x = np.ones((2, 6), "f")
    with pytest.raises(RankMismatchError, match="seed them alike"):
        link(x)
    file = tmp_path / f"{comm.rank}.npz"
    chainer.serializers.save_npz(file, both(kind, comm)[0])
    np.random.seed(comm.rank)
    loaded = kind(7, 5, comm)
    chainer.serializers.load_npz(file, loaded)
    loaded(np.ones((2, 7), "f"))


@pytest.mark.sizes(2, 3, 4)
def test_an_optimizer_over_the_ranks_that_divide_a_model_is_refused(comm):
    placed = MultiNodeChainList(comm)
    placed.add_link(L.Linear(2, 2), rank_out=comm.rank)
    rnn = create_multi_node_n_step_rnn(
        L.NStepGRU(1, 2, 2, 0), comm, rank_out=(comm.rank + 1) % comm.size
    )
    for model in (Model(comm), placed, copy.deepcopy(rnn)):
        with pytest.raises(ValueError, match=r"held in parts.*comm\.split"):
            create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    same = comm.split(comm.rank, 0)
    create_multi_node_optimizer(chainer.optimizers.SGD(), same).setup(Model(comm))


@pytest.mark.parametrize("duplicate", [lambda model: model, copy.deepcopy])
def test_parameters_say_how_ranks_hold_them(comm, random, duplicate):
    model = duplicate(Model(comm))
    whole = Model(comm.split(comm.rank, 0))
    x = random.standard_normal((3, 6)).astype("f")
    for each in (model, whole):
        each.cleargrads()
        each(x).backward()
    expected = sum(float(np.sum(p.grad.astype("d") ** 2)) for p in whole.params())
    np.testing.assert_allclose(global_norm(comm, model) ** 2, expected, rtol=1e-5)
    kinds = {
        name: [each.kind for each in getattr(param, "shardings", ())]
        for name, param in model.namedparams()
    }
    assert {path: each for path, each in kinds.items() if each} == {
        "/hidden/W": ["shard"],
        "/hidden/b": ["shard"],
        "/output/W": ["shard"],
        "/output/b": ["replica"],
    }
    placed = MultiNodeChainList(comm)
    placed.add_link(model, rank_out=comm.rank)
    for _, param in placed.namedparams():
        last = param.shardings[-1]
        assert (last.kind, last.group) == ("placed", comm)

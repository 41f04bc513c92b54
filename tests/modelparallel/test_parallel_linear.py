"""Column- and row-parallel `Linear` against `Linear` in one process, from the same seed."""

from __future__ import annotations

from copy import deepcopy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, ChainList, Parameter, Variable, using_config
from chainer.optimizers import SGD, MomentumSGD
from chainer.serializers import load_npz, save_npz
from chainer.utils.type_check import InvalidType
from chainermn.optimizers import _MultiNodeOptimizer
from numpy.testing import assert_allclose, assert_array_equal, assert_equal

from chainermn_comm import RankMismatchError
from chainermn_modelparallel import (
    ColumnParallelLinear,
    MultiNodeChainList,
    RowParallelLinear,
    create_multi_node_n_step_rnn,
)
from chainermn_train import create_multi_node_optimizer
from tests.support.oracles.raised import raises_on_all

pytestmark = pytest.mark.world

TOLERANCE = {np.float16: 1e-2, np.float32: 1e-5, np.float64: 1e-12}
EACH = pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])


@pytest.fixture(params=TOLERANCE)
def dtype(request):
    with using_config("dtype", request.param):
        yield request.param


def both(kind, comm, nobias=False):
    """The parallel link and the whole one, drawn from the same seed; sizes don't divide by 2."""
    options = {"nobias": nobias, "initial_bias": chainer.initializers.Normal()}
    np.random.seed(7)
    link = kind(7, 5, comm, **options)
    np.random.seed(7)
    return link, L.Linear(7, 5, **options)


def part(comm, size):
    rows = np.array_split(np.arange(size), comm.size)[comm.rank]
    return slice(rows[0], rows[-1] + 1)


def part_of_weights(kind, comm):
    if kind is ColumnParallelLinear:
        return part(comm, 5), slice(None)
    return slice(None), part(comm, 7)


def differentiated(model, data, weights):
    """Run backward through a model; its output and the gradient of its input."""
    x = Variable(data)
    y = model(x)
    F.sum(y * y * weights).backward()
    return y.array, x.grad


@pytest.mark.parametrize("nobias", [False, True])
@EACH
def test_values_and_gradients_are_those_of_one_process(
    comm, random, kind, nobias, dtype
):
    link, alone = both(kind, comm, nobias)
    rows = part_of_weights(kind, comm)
    assert_array_equal(link.W.array, alone.W.array[rows])
    data = random.standard_normal((3, 7)).astype(dtype)
    weights = random.standard_normal((3, 5)).astype(dtype)
    for each in (link, alone):
        each.cleargrads()
    found = [*differentiated(link, data, weights), link.W.grad]
    expected = [*differentiated(alone, data, weights), alone.W.grad[rows]]
    assert (link.b is None) == nobias
    if not nobias:
        assert_array_equal(link.b.array, alone.b.array[rows[0]])
        found.append(link.b.grad)
        expected.append(alone.b.grad[rows[0]])
    for actual, desired in zip(found, expected, strict=True):
        assert actual.dtype == desired.dtype
        tolerance = TOLERANCE[dtype]
        scale = max(1, np.abs(desired).max())
        assert_allclose(actual, desired, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("gathered", [False, True])
def test_a_pair_is_differentiated_twice_as_in_one_process(comm, random, gathered):
    """Megatron's pair: columns, an activation, rows; it needs no gathering between."""
    with using_config("dtype", np.float64):
        np.random.seed(3)
        alone = L.Linear(4, 9), L.Linear(9, 2)
        np.random.seed(3)
        first = ColumnParallelLinear(4, 9, comm, gather_output=gathered)
        second = RowParallelLinear(9, 2, comm, input_is_parallel=not gathered)
    rows = part(comm, 9)
    every = slice(None)
    x = Variable(random.standard_normal((3, 4)))
    if gathered:
        width = 9
    else:
        width = rows.stop - rows.start
    assert first(x).shape == (3, width)
    found = penalized(first, second, x)
    expected = penalized(*alone, x)
    parts = (every, rows, rows, (every, rows), every)
    for actual, desired, its in zip(found, expected, parts, strict=True):
        assert_allclose(actual, desired[its], rtol=1e-11, atol=1e-11)


def penalized(first, second, x):
    """Return the gradients of a function of a gradient."""
    links = ChainList(first, second)
    links.cleargrads()
    x.cleargrad()
    loss = F.sum(second(F.tanh(first(x))) ** 3)
    (gx,) = chainer.grad([loss], [x], enable_double_backprop=True)
    (loss + F.sum(F.sin(gx))).backward()
    return [each.grad for each in (x, first.W, first.b, second.W, second.b)]


@EACH
def test_copies_hold_a_ranks_own_part(comm, random, kind):
    link, alone = both(kind, comm)
    taken_over = kind(7, 5, comm, initialW=alone.W.array, initial_bias=alone.b.array)
    x = random.standard_normal((2, 7)).astype("f")
    for each in (taken_over, deepcopy(link), link.copy("copy")):
        assert_array_equal(each(x).array, link(x).array)
    np.random.seed(11)
    drawn = link.copy("init")
    np.random.seed(11)
    whole = L.Linear(7, 5).W.array
    assert_array_equal(drawn.W.array, whole[part_of_weights(kind, comm)])


@pytest.mark.parametrize("wrong", [None, np.ones((2, 99), "f")])
@pytest.mark.parametrize("is_parallel", [None, False, True])
def test_a_wrong_input_on_one_rank_raises_on_all(comm, is_parallel, wrong):
    link = ColumnParallelLinear(7, 5, comm)
    if is_parallel is not None:
        link = RowParallelLinear(7, 5, comm, input_is_parallel=is_parallel)
    width = 7
    if is_parallel:
        width = link.W.shape[1]
    right = np.ones((2, width), "f")
    x = right
    if comm.rank == 0:
        x = wrong
    with raises_on_all(comm.rank == 0, (TypeError, InvalidType)):
        link(x)
    link(right)


def test_wrong_sizes_raise(comm):
    with pytest.raises(TypeError, match="comm must be a communicator"):
        ColumnParallelLinear(3, 3, None)
    for wrong in (None, 0, 2.0):
        with pytest.raises(ValueError, match="in_size must be an integer"):
            ColumnParallelLinear(wrong, comm.size, comm)
    with pytest.raises(
        ValueError, match=f"in_size must be an integer from {comm.size} to"
    ):
        RowParallelLinear(comm.size - 1, 3, comm)


class Model(Chain):
    """Plain links around the two parallel ones; all ranks seed it alike."""

    def __init__(self, comm):
        super().__init__()
        np.random.seed(0)
        with self.init_scope():
            self.first = L.Linear(6, 6)
            self.hidden = ColumnParallelLinear(6, 8, comm, gather_output=False)
            self.output = RowParallelLinear(8, 5, comm, input_is_parallel=True)
            self.last = L.Linear(5, 2)

    def forward(self, x):
        h = F.tanh(self.hidden(self.first(x)))
        h = F.tanh(self.output(h))
        return F.sum(self.last(h) ** 2)


def clip(optimizer):
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.1))


def freeze(path):
    """A change that lets one rank alone keep a parameter that all ranks have alike."""

    def change(optimizer):
        if optimizer.target.hidden.comm.rank == 0:
            param = dict(optimizer.target.namedparams())[path]
            param.update_rule.enabled = False

    return change


def replace_last(optimizer):
    model = optimizer.target
    if model.hidden.comm.rank == 0:
        del model.last
        model.add_link("last", L.Linear(5, 2))
        optimizer.setup(model)


def update_twice(optimizer, x):
    optimizer.update(optimizer.target, x)
    optimizer.update(optimizer.target, x)


VALUES = (
    r"of shape .* must be the same on all ranks, but differ: the ranks' norms are \["
)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (clip, VALUES),
        (freeze("/first/W"), rf"^ColumnParallelLinear on rank \d: values {VALUES}"),
        (freeze("/last/W"), "^backward of RowParallelLinear on .* frozen or loaded"),
        (freeze("/output/b"), rf"^RowParallelLinear on rank \d: b {VALUES}"),
        (replace_last, "^backward of RowParallelLinear on .* parameter was replaced"),
    ],
)
def test_replicas_that_part_raise_at_the_next_step_on_all_ranks(
    comm, random, change, text
):
    """By the name of the link, and with the likely causes."""
    x = random.standard_normal((3, 6)).astype("f")
    model = Model(comm)
    optimizer = SGD(0.1).setup(model)
    change(optimizer)
    with pytest.raises(RankMismatchError, match=text) as caught:
        update_twice(optimizer, x)
    assert "MultiNodeGradientClipping" in str(caught.value)
    assert ColumnParallelLinear(6, 8, comm, initialW=1)(x).shape == (3, 8)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("kind", [SGD, MomentumSGD])
def test_ranks_have_one_optimizer_and_its_hyperparameters(comm, kind):
    link = ColumnParallelLinear(6, 6, comm, initialW=1)
    optimizer = SGD(0.1)
    if comm.rank == 1:
        optimizer = kind(0.2)
    optimizer.setup(link)
    text = rf"SGDRule .*lr=0\.1\) on .*; {kind.__name__}Rule .*lr=0\.2.* on rank 1"
    with pytest.raises(RankMismatchError, match=text):
        link(np.ones((3, 6), "f"))


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (np.zeros_like, "the same inputs"),
        (np.flipud, "the same inputs"),
        (lambda x: x * np.float32(1.01), "the same inputs"),
        (lambda x: x[:2], r"float32 \(2, 6\) on rank 0; float32 \(3, 6\)"),
        (np.float64, r"float64 \(3, 6\) on rank 0; float32 \(3, 6\)"),
    ],
)
@EACH
def test_inputs_that_differ_raise_on_all_ranks(comm, random, kind, spoil, text):
    x = random.standard_normal((3, 6)).astype("f")
    given = x
    if comm.rank == 0:
        given = spoil(x)
    with pytest.raises(RankMismatchError, match=text):
        kind(6, 6, comm, initialW=1)(given)


@pytest.mark.sizes(2, 3, 4)
@EACH
def test_inputs_may_differ_by_rounding(comm, random, kind):
    x = random.standard_normal((3, 6)).astype("f")
    if comm.rank == 0:
        x *= 1 + np.float32(1e-6)
    assert kind(6, 6, comm, initialW=1)(x).shape == (3, 6)


@pytest.mark.sizes(2, 3, 4)
def test_a_difference_is_noticed_where_the_projection_hardly_shows_it(comm):
    x = np.zeros((12, 12), "f")
    x[11, 11] = 1 + comm.rank  # cos(11) is 0.004
    with pytest.raises(RankMismatchError, match="the same inputs"):
        ColumnParallelLinear(12, 6, comm, initialW=1)(x)


@pytest.mark.sizes(2, 3, 4)
@EACH
def test_integers_that_differ_raise_the_same_error(comm, kind):
    with pytest.raises(RankMismatchError, match="the same inputs"):
        kind(6, 6, comm, initialW=1)(np.full((3, 6), comm.rank))


@pytest.mark.sizes(2, 3, 4)
@EACH
def test_an_infinite_value_of_one_rank_raises_the_same_error(comm, kind):
    x = np.ones((3, 6), "f")
    if comm.rank == 1:
        x[0, 0] = np.inf
    with pytest.raises(RankMismatchError, match="the same inputs"):
        kind(6, 6, comm, initialW=1)(x)


@pytest.mark.sizes(2, 3, 4)
@EACH
def test_an_array_without_dimensions_is_refused(comm, kind):
    with pytest.raises(InvalidType):
        kind(6, 6, comm)(np.array(1, "f"))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.0])
def test_the_same_values_are_no_difference_nor_is_rounding(comm, value):
    x = np.full((3, 6), value, "f")
    with np.errstate(all="ignore"):
        model = Model(comm)
        x[comm.rank % 3, 0] *= np.float32(1 + 2e-7)
        loss = model(x)
        loss.backward()
    assert_equal(np.isfinite(loss.array), value == 1.0)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("kind", "initialW", "text"),
    [
        (ColumnParallelLinear, None, "seed them alike"),
        (ColumnParallelLinear, 1, "seed them alike"),
        (RowParallelLinear, None, "seed them alike"),
        (RowParallelLinear, 1, "b of shape .* must be the same"),
    ],
)
def test_unseeded_ranks_raise_unless_they_load_their_part(
    comm, tmp_path, kind, initialW, text
):
    """Also where only the bias is drawn."""
    x = np.ones((2, 7), "f")
    saved, _ = both(kind, comm)
    file = tmp_path / f"{comm.rank}.npz"
    save_npz(file, saved)
    np.random.seed(comm.rank)
    link = kind(
        7, 5, comm, initialW=initialW, initial_bias=chainer.initializers.Normal()
    )
    with pytest.raises(RankMismatchError, match=text):
        link(x)
    copy = link.copy("copy")
    copy.copyparams(saved)
    load_npz(file, link)
    for each in link, copy:
        assert_array_equal(each(x).array, saved(x).array)


@pytest.mark.sizes(2, 3, 4)
def test_an_optimizer_over_the_ranks_that_divide_a_model_is_refused(comm):
    placed = MultiNodeChainList(comm)
    placed.add_link(L.Linear(2, 2), rank_out=comm.rank)
    peer = (comm.rank + 1) % comm.size
    rnn = create_multi_node_n_step_rnn(L.NStepGRU(1, 2, 2, 0), comm, rank_out=peer)
    for model in (Model(comm), placed, rnn):
        unwrapped = SGD().setup(model)
        legacy = _MultiNodeOptimizer(SGD(), comm)
        optimizer = create_multi_node_optimizer(unwrapped, comm)
        for call in optimizer.update, optimizer.assume_synchronized:
            with pytest.raises(ValueError, match=r"part.*comm\.split"):
                call()
        for each in optimizer, legacy:
            with pytest.raises(ValueError, match=r"held in parts.*comm\.split"):
                each.setup(model)


@pytest.mark.sizes(4)
def test_an_optimizer_over_other_parts_of_other_groups_is_refused(comm):
    model = Model(comm.split(comm.rank // 2, comm.rank))
    twisted = comm.split(int(comm.rank in (1, 2)), comm.rank)
    optimizer = create_multi_node_optimizer(SGD(), twisted).setup(model)
    with pytest.raises(ValueError, match=r"update.*comm\.split\): /hidden/W shard"):
        optimizer.update()


@pytest.mark.sizes(2, 3, 4)
@EACH
def test_an_array_takes_the_place_of_a_drawn_matrix(comm, tmp_path, kind):
    link, _ = both(kind, comm)
    link.W = Parameter(link.W.array)
    file = tmp_path / f"{comm.rank}.npz"
    save_npz(file, link)
    load_npz(file, link)
    x = np.ones((2, 7), "f")
    assert_array_equal(link(x).array, both(kind, comm)[0](x).array)


@pytest.mark.parametrize("duplicate", [lambda model: model, deepcopy])
def test_parameters_say_how_ranks_hold_them(comm, duplicate):
    model = duplicate(Model(comm))
    kinds = {
        name: param.shardings[0].kind
        for name, param in model.namedparams()
        if getattr(param, "shardings", ())
    }
    assert kinds == {
        "/hidden/W": "shard",
        "/hidden/b": "shard",
        "/output/W": "shard",
        "/output/b": "replica",
    }
    placed = MultiNodeChainList(comm)
    placed.add_link(model, rank_out=comm.rank)
    for _, param in placed.namedparams():
        last = param.shardings[-1]
        assert last.kind == "placed"
        assert last.group == comm

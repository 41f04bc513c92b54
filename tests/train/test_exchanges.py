"""However gradients are exchanged, ranks train as one process does with all their examples."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.optimizer_hooks import GradientClipping, WeightDecay
from chainer.training.extensions import ParameterStatistics

from chainermn_comm import RankMismatchError, Reducer
from chainermn_modelparallel import MultiNodeBatchNormalization
from tests.support.plugins.pairwise import pairwise
from tests.support.training.exchanges import HIERARCHICAL, KINDS, OneProcess, exchanging
from tests.support.training.linear import Model, X
from tests.support.training.trainers import (
    assert_near,
    logged,
    parameter_bits,
    same_everywhere,
    trainer_over,
)
from tests.support.worlds.third_party import PlainCommunicator

pytestmark = [pytest.mark.world, pytest.mark.usefixtures("double_precision")]

UPDATES, BATCH, WIDTH, CLASSES = 20, 4, 6, 3
TOLERANCE = 1e-10


class Tied(chainer.Chain):
    """One weight has two paths, and lies in two links."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.encoder, self.decoder = L.Linear(WIDTH, WIDTH), L.Linear(WIDTH, WIDTH)
        self.decoder.W = self.encoder.W

    def __call__(self, x, t):
        return F.mean_squared_error(self.decoder(F.tanh(self.encoder(x))), x)


class Recurrent(chainer.Chain):
    """An LSTM over the numbers of an example, two at a time."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.cell, self.last = L.LSTM(2, 4), L.Linear(4, CLASSES)

    def __call__(self, x, t):
        self.cell.reset_state()
        for start in range(0, WIDTH, 2):
            h = self.cell(x[:, start : start + 2])
        return F.softmax_cross_entropy(self.last(h), t)


class Normalized(chainer.Chain):
    """Batch normalization by the statistics of all ranks' examples; of one process without them."""

    def __init__(self, comm=None):
        super().__init__()
        with self.init_scope():
            # A bias would have no gradient but rounding errors, which Adam makes large.
            self.first, self.last = (
                L.Linear(WIDTH, 5, nobias=True),
                L.Linear(5, CLASSES),
            )
            if comm is None:
                self.norm = L.BatchNormalization(5)
            else:
                self.norm = MultiNodeBatchNormalization(5, comm, dtype=None)

    def __call__(self, x, t):
        return F.softmax_cross_entropy(self.last(F.tanh(self.norm(self.first(x)))), t)


class Lazy(chainer.Chain):
    """Its weights are drawn when it first sees examples."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.first, self.last = L.Linear(None, 5), L.Linear(None, CLASSES)

    def __call__(self, x, t):
        return F.softmax_cross_entropy(self.last(F.tanh(self.first(x))), t)


class Uneven(chainer.Chain):
    """A link that is used twice, and one that is not used at all."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.twice, self.unused = L.Linear(WIDTH, WIDTH), L.Linear(WIDTH, 2)
            self.last = L.Linear(WIDTH, CLASSES)

    def __call__(self, x, t):
        h = F.tanh(self.twice(F.tanh(self.twice(x))))
        return F.softmax_cross_entropy(self.last(h), t)


MODELS = {
    "tied": Tied,
    "recurrent": Recurrent,
    "normalized": Normalized,
    "lazy": Lazy,
    "uneven": Uneven,
}
OPTIMIZERS = {
    "sgd": lambda: chainer.optimizers.SGD(lr=0.2),
    "momentum": lambda: chainer.optimizers.MomentumSGD(lr=0.2),
    "adam": lambda: chainer.optimizers.Adam(alpha=0.01),
}
# Updates of a step, and a loss scale.
CONDITIONS = {"each": (1, None), "of three": (3, None), "scaled": (1, 64.0)}


def batch(rank, number):
    random = np.random.RandomState((rank, number))
    return random.uniform(-1, 1, (BATCH, WIDTH)), random.randint(
        0, CLASSES, BATCH
    ).astype("i4")


def joint(comm, *numbers):
    """The batches of all ranks and of these numbers, put together."""
    every = [batch(rank, number) for number in numbers for rank in range(comm.size)]
    return [np.concatenate(parts) for parts in zip(*every, strict=True)]


def seeded(seed, make, *args):
    np.random.seed(seed)
    return make(*args)


def prepare(optimizer, scale, hooks=True):
    if hooks:
        optimizer.add_hook(WeightDecay(1e-2))
        optimizer.add_hook(GradientClipping(0.1))  # less than any gradient's norm
    if scale is not None:
        optimizer.set_loss_scale(scale)
    return optimizer


@pairwise(kind=KINDS, model=MODELS, optimizer=OPTIMIZERS, condition=CONDITIONS)
def test_ranks_train_as_one_process_does(comm, kind, model, optimizer, condition):
    """And have the same bits after every update, whatever the paths to a parameter."""
    (steps, scale), make, is_lazy = (
        CONDITIONS[condition],
        MODELS[model],
        model == "lazy",
    )
    # A third party's zeros for what no rank uses are scaled, and one process's are not.
    hooks = not (scale and model == "uneven" and isinstance(comm, PlainCommunicator))
    mine = seeded(comm.rank, make, *([comm] if model == "normalized" else []))
    expected = seeded(0, make)
    many = prepare(
        exchanging(kind, comm, OPTIMIZERS[optimizer](), mine, steps), scale, hooks
    )
    actual = prepare(OPTIMIZERS[optimizer]().setup(expected), scale, hooks)
    single = OneProcess(kind, actual, steps)
    if is_lazy:  # each rank draws weights, rank 0's are taken, and nobody steps
        seeded(comm.rank, many.update, mine, *batch(comm.rank, UPDATES))
        seeded(0, expected, *joint(comm, UPDATES))
        assert same_everywhere(comm, mine)
        assert parameter_bits(mine) == parameter_bits(expected)
    for number in range(UPDATES):
        many.update(mine, *batch(comm.rank, number))
        single.update(*joint(comm, number))
        assert same_everywhere(comm, mine)
        assert many.t == actual.t == max(0, (number + 1) // steps - KINDS[kind].delay)
        assert_near(mine, expected, TOLERANCE)
    many.flush()
    single.flush()
    assert many.t == actual.t == -(-UPDATES // steps)
    assert same_everywhere(comm, mine)
    assert_near(mine, expected, TOLERANCE)
    many.finalize()


@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_tied_weights_train_with_accumulation_as_without(comm, kind, steps):
    """And weights that are tied while training goes on."""

    def tie(model):
        model.decoder.b = model.encoder.b

    mine, expected = seeded(comm.rank, Tied), seeded(0, Tied)
    many = exchanging(kind, comm, chainer.optimizers.Adam(), mine, steps)
    single = OneProcess(kind, chainer.optimizers.Adam().setup(expected))
    for step in range(8):
        if step == 4:
            many.flush()  # what is in flight would be dropped
            single.flush()
            tie(mine)
            tie(expected)
        numbers = range(step * steps, (step + 1) * steps)
        for number in numbers:
            many.update(mine, *batch(comm.rank, number))
        single.update(*joint(comm, *numbers))
        assert mine.decoder.W is mine.encoder.W
        assert (mine.decoder.b is mine.encoder.b) == (step >= 4)
        assert same_everywhere(comm, mine)
        assert_near(mine, expected, TOLERANCE)
    many.flush()
    single.flush()
    assert many.t == 8
    assert_near(mine, expected, TOLERANCE)
    many.finalize()


@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_of_what_is_not_updated_are_not_sent(comm, kind, steps, monkeypatch):
    """They are frozen and thawed while training goes on."""
    sent = set()
    for owner, name in (Reducer, "add"), (type(comm.make_reducer()), "add_planned"):
        add = getattr(owner, name)

        def noting(self, bucket, add=add):
            sent.update(
                name for name, each in bucket.namedparams() if each.grad is not None
            )
            return add(self, bucket)

        monkeypatch.setattr(owner, name, noting)
    mine, expected = seeded(comm.rank, Uneven), seeded(0, Uneven)
    many = prepare(
        exchanging(kind, comm, chainer.optimizers.SGD(0.2), mine, steps), None, False
    )
    single = OneProcess(kind, chainer.optimizers.SGD(0.2).setup(expected), steps)
    for number in range(12 * steps):
        if number in (4 * steps, 8 * steps):
            many.flush()
            single.flush()
            for model in mine, expected:
                (
                    model.twice.disable_update
                    if number == 4 * steps
                    else model.twice.enable_update
                )()
            sent.clear()
        many.update(mine, *batch(comm.rank, number))
        single.update(*joint(comm, number))
        assert same_everywhere(comm, mine)
        is_frozen = 4 * steps <= number < 8 * steps
        assert not is_frozen or sent <= {"/last/W", "/last/b"}
    many.flush()
    single.flush()
    assert "/twice/W" in sent
    assert_near(mine, expected, TOLERANCE)
    many.finalize()


# Gradients that extensions look at.


@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("model", ["recurrent", "lazy"])
def test_parameters_hold_gradients_after_every_update(comm, kind, steps, model):
    mine = seeded(comm.rank, MODELS[model])
    many = exchanging(kind, comm, chainer.optimizers.SGD(lr=0.1), mine, steps)
    for number in range(7):
        many.update(mine, *batch(comm.rank, number))
        for name, param in mine.namedparams():
            assert param.grad is not None, (number, name)
            assert param.grad.shape == param.shape
            assert np.isfinite(param.grad).all()
            assert param.grad.any(), (number, name)
    many.finalize()


@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_statistics_of_gradients_are_reported_from_the_first_update_on(
    comm, kind, steps, tmp_path
):
    model = Model(comm.rank)
    many = exchanging(kind, comm, chainer.optimizers.SGD(lr=0.1), model, steps)
    examples = X.astype(float) + comm.rank
    trainer = trainer_over(examples, 2, many, (7, "iteration"), tmp_path)
    each = (1, "iteration")
    trainer.extend(
        ParameterStatistics(model, {"mean": np.mean}, trigger=each), trigger=each
    )
    rows = logged(trainer)
    assert len(rows) == 7
    for row in rows:
        found = [value for name, value in row.items() if name.endswith("/grad/mean")]
        assert len(found) == 2, row
        assert np.isfinite(found).all()
        assert np.all(found)
    many.finalize()


# Loss scales.


@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_scale_that_all_ranks_change_makes_no_difference(comm, kind, steps):
    """In the middle of a group, or with gradients in flight, either."""
    mine, expected = seeded(comm.rank, Recurrent), seeded(0, Recurrent)
    many = exchanging(kind, comm, OPTIMIZERS["momentum"](), mine, steps)
    single = OneProcess(kind, OPTIMIZERS["momentum"]().setup(expected), steps)
    scales = {0: 8.0, 4: 512.0, 5: 0.25, 11: 1024.0}
    for number in range(UPDATES):
        if number in scales:
            many.set_loss_scale(scales[number])
        many.update(mine, *batch(comm.rank, number))
        single.update(*joint(comm, number))
        assert same_everywhere(comm, mine)
        assert_near(mine, expected, TOLERANCE)
    many.finalize()


@pytest.mark.sizes(2, 3, 4)
@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", [0, -1])
def test_a_scale_that_one_rank_changes_is_named_and_only_that_update_is_lost(
    comm, kind, where
):
    changing = where % comm.size
    mine, expected = seeded(comm.rank, Recurrent), seeded(0, Recurrent)
    many = exchanging(kind, comm, OPTIMIZERS["momentum"](), mine)
    single = OneProcess(kind, OPTIMIZERS["momentum"]().setup(expected))
    many.set_loss_scale(4.0)
    for number in range(8):
        if number == 4:
            before = many.t, parameter_bits(mine)
            if comm.rank == changing:
                many.set_loss_scale(16.0)
            named = f"the loss scale .*16 on rank {changing}"
            with pytest.raises(RankMismatchError, match=named):
                many.update(mine, *batch(comm.rank, UPDATES))
            assert same_everywhere(comm, mine)
            assert (many.t, parameter_bits(mine)) == before
            many.set_loss_scale(16.0)
        many.update(mine, *batch(comm.rank, number))
        single.update(*joint(comm, number))
        assert same_everywhere(comm, mine)
        assert_near(mine, expected, TOLERANCE)
    many.finalize()


@HIERARCHICAL
@pytest.mark.parametrize("kind", KINDS)
def test_what_no_rank_uses_is_decayed_and_clipped_as_in_one_process(comm, kind):
    """With a loss scale, by Chainer's own update."""
    mine, expected = seeded(comm.rank, Uneven), seeded(0, Uneven)
    many = prepare(exchanging(kind, comm, OPTIMIZERS["sgd"](), mine), 64.0)
    single = prepare(OPTIMIZERS["sgd"]().setup(expected), 64.0)
    for _ in range(4):  # gradients are the same in each, and so may be late
        many.update(lambda: F.sum(mine.last.b * np.ones(CLASSES)))
        single.update(lambda: F.sum(expected.last.b * np.ones(CLASSES)))
    many.flush()
    assert many.t == single.t == 4
    assert same_everywhere(comm, mine)
    assert_near(mine, expected, TOLERANCE)
    many.finalize()

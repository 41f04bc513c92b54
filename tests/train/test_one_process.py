"""However ranks share a model and exchange gradients, they train as one process does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from chainer import using_config
from chainer.functions import identity
from chainer.optimizer_hooks import GradientClipping, WeightDecay
from chainer.optimizers import SGD, Adam, MomentumSGD
from chainermn.optimizers import _MultiNodeOptimizer

from chainermn_modelparallel import share_loss_scale
from chainermn_train import MultiNodeGradientClipping
from tests.support.plugins.pairwise import pairs
from tests.support.training import over_ranks
from tests.support.training.exchanges import (
    KINDS,
    WHOLE_KINDS,
    OneProcess,
    exchanging,
)
from tests.support.training.over_ranks import (
    Tied,
    alike,
    batch,
    joint_batch,
    lazy,
    seeded,
    two_layers,
)
from tests.support.training.trainers import (
    float32_parameters,
    load_state,
    parameter_bits,
    parameters,
    same_everywhere,
    state_of,
)

pytestmark = [
    pytest.mark.world,
    pytest.mark.filterwarnings("ignore:Non finite number found in param.grad"),
]

UPDATES = 20
THRESHOLD = 0.01  # less than any gradient's norm
INTERVAL = 2  # in which a loss scale doubles


# Optimizers.


adam = partial(Adam, alpha=0.01)


def adam_in_float32():
    optimizer = Adam(eps=1e-4)
    optimizer.use_fp32_update()
    return optimizer


class WithOwnUpdate(_MultiNodeOptimizer):
    """It takes the steps itself, as the class of 1.x did."""

    def __init__(self, actual_optimizer, communicator, zero_fill):
        super(_MultiNodeOptimizer, self).__setattr__("communicator", communicator)
        super(_MultiNodeOptimizer, self).__setattr__(
            "actual_optimizer", actual_optimizer
        )
        super().__setattr__("zero_fill", zero_fill)
        super().__setattr__("target_params", [])
        object.__setattr__(self, "losses", [])

    def update(self, lossfun=None, *args, **kwds):
        target = self.target
        if lossfun is not None:
            loss = lossfun(*args, **kwds)
            target.cleargrads()
            loss.backward()
            self.losses.append(float(loss.array))
        if self.is_changed(target):
            self.communicator.bcast_data(target)
        else:
            self.communicator.allreduce_grad(target)
            self.actual_optimizer.update(None)


# In place of `exchanging`.


def by_chainer(kind, comm, actual, model, steps):
    return actual.setup(model)


def of_1_x(made, kind, comm, actual, model, steps):
    return made(actual, comm, True).setup(model)


# Hooks, of an optimizer of all ranks of a communicator or, without one, of one process.


def no_hooks(optimizer, comm):
    pass


def decay_and_clip(optimizer, comm):
    optimizer.add_hook(WeightDecay(1e-2))
    optimizer.add_hook(GradientClipping(THRESHOLD))


def clip_parts(optimizer, comm):
    if comm is None:
        hook = GradientClipping(THRESHOLD)
    else:
        hook = MultiNodeGradientClipping(THRESHOLD, comm)
    optimizer.add_hook(hook)


def clip_parts_of_pairs(optimizer, comm):
    """The ranks of a pair hold the parts of one model."""
    if comm is not None:
        comm = comm.split(comm.rank // 2, comm.rank)
    clip_parts(optimizer, comm)


def adapt_scale(optimizer, comm):
    optimizer.loss_scaling(INTERVAL)


def adapt_scale_together(optimizer, comm):
    if comm is None:
        optimizer.loss_scaling(INTERVAL)
    else:
        optimizer.loss_scaling(INTERVAL + comm.rank)  # rank 0's is for all
        share_loss_scale(optimizer, comm)


# What happens to a model on all ranks and in one process, or to its optimizer.


def tie(optimizer):
    model = optimizer.target
    model.decoder.b = model.encoder.b


def freeze(optimizer):
    optimizer.target.encoder.disable_update()


def thaw(optimizer):
    optimizer.target.encoder.enable_update()


def step_again(optimizer):
    """Without a loss, along the gradients that are left of the last step."""
    optimizer.update()


def infinite(h):
    return h * np.inf


def overflow(optimizer):
    optimizer.target.between = infinite


def recover(optimizer):
    optimizer.target.between = identity


def resume(optimizer):
    """On ranks alone: a snapshot of Chainer's optimizer holds no scale."""
    if isinstance(optimizer, OneProcess):
        return
    state = state_of(optimizer)
    optimizer.setup(optimizer.target)
    adapt_scale(optimizer, None)
    load_state(optimizer, state)


# The table.


@dataclass(frozen=True)
class Row:
    """A training of ranks that is like one of one process."""

    models: Callable  # from a place to `Models`
    place: Callable = over_ranks.whole  # from a communicator
    make_optimizer: Callable = adam
    add_hooks: Callable = no_hooks
    # What happens before the update of this number.
    changes: dict = field(default_factory=dict)
    # Makes an optimizer of all ranks; only `exchanging` has kinds of exchanges.
    wrap: Callable = exchanging
    # Whether it is for each kind of exchange and several steps, or for the synchronous one.
    each_exchange: bool = True
    # Whether the first update gives all ranks rank 0's parameters, and makes no step.
    shares_first: bool = False
    # Whether some gradients aren't finite, so that nobody steps.
    overflows: bool = False
    dtype: str = "f8"
    # By how much a parameter may differ.
    tolerance: float = 1e-10
    # Kinds of exchanges, and numbers of ranks.
    kinds: tuple = tuple(KINDS)
    sizes: tuple = (1, 2, 3, 4)


tied = partial(alike, Tied)
layers = partial(alike, two_layers)
# Adam would make the rounding errors large of gradients that are nearly zeros.
with_momentum = partial(
    Row, make_optimizer=partial(MomentumSGD, 0.5), add_hooks=decay_and_clip
)
of_old_class = partial(Row, layers, each_exchange=False, shares_first=True)
clipped = partial(
    Row,
    over_ranks.in_parts,
    place=over_ranks.in_one_group,
    make_optimizer=partial(MomentumSGD, 0.5),
    add_hooks=clip_parts,
)
scaled = partial(
    Row,
    place=over_ranks.in_one_group,
    make_optimizer=partial(SGD, 2.0**-11),
    add_hooks=adapt_scale_together,
    each_exchange=False,
    overflows=True,
    dtype="f2",
    tolerance=1e-3,
)

ROWS = {
    "tied": Row(tied, add_hooks=decay_and_clip),
    "tied later": Row(tied, changes={6: tie}),
    # One process's hooks would see the gradients of what is not updated.
    "frozen and thawed": Row(tied, changes={6: freeze, 12: thaw}),
    # After a sharded update gradients are a rank's own.
    "along old gradients": Row(
        tied, changes={6: step_again, 12: step_again}, kinds=tuple(WHOLE_KINDS)
    ),
    "normalized": with_momentum(over_ranks.normalized),
    "lazy": with_momentum(partial(alike, lazy), shares_first=True),
    "old class": of_old_class(wrap=partial(of_1_x, _MultiNodeOptimizer)),
    "old class, own update": of_old_class(wrap=partial(of_1_x, WithOwnUpdate)),
    "clipped in parts": clipped(),
    "clipped in parts, by pairs": clipped(
        place=over_ranks.in_pairs, kinds=tuple(WHOLE_KINDS), sizes=(4,)
    ),
    "clipped in parts, sharded over pairs": clipped(
        place=over_ranks.in_pairs,
        add_hooks=clip_parts_of_pairs,
        kinds=("sharded",),
        sizes=(4,),
    ),
    "clipped in parts, by Chainer": clipped(wrap=by_chainer, each_exchange=False),
    # The mean of gradients that all ranks have alike has their bits.
    "scaled and resumed": Row(
        layers,
        place=over_ranks.with_one_batch,
        make_optimizer=adam_in_float32,
        add_hooks=adapt_scale,
        changes={3: overflow, 4: recover, 6: resume},
        each_exchange=False,
        overflows=True,
        dtype="f2",
        tolerance=0,
    ),
    "scaled links": scaled(over_ranks.placed),
    "scaled links, by pairs": scaled(
        over_ranks.placed, place=over_ranks.in_pairs, sizes=(4,)
    ),
    "scaled links, by Chainer": scaled(over_ranks.placed, wrap=by_chainer),
    "scaled columns, by Chainer": scaled(over_ranks.in_columns, wrap=by_chainer),
}


def cases():
    """Each row on its numbers of ranks; with each kind of exchange if it is for all."""
    of_each = [name for name, row in ROWS.items() if row.each_exchange]
    chosen = pairs(of_each, KINDS, [1, 3])
    for name in ROWS:
        if name not in of_each:
            chosen.append(pytest.param(name, "synchronous", 1))
    return [on_sizes(it) for it in chosen if it.values[1] in ROWS[it.values[0]].kinds]


def on_sizes(case):
    row = ROWS[case.values[0]]
    marks = [*case.marks, pytest.mark.sizes(*row.sizes)]
    return pytest.param(*case.values, marks=marks)


# Training.


class Training:
    """On ranks and in one process."""

    def __init__(self, row, comm, kind, steps):
        self.row = row
        self.tolerance = row.tolerance
        if row.each_exchange:
            self.tolerance = max(row.tolerance, KINDS[kind].tolerance)
        self.place = row.place(comm)
        self.models = row.models(self.place)
        actual = row.make_optimizer()
        self.many = row.wrap(kind, self.place.mean, actual, self.models.mine, steps)
        row.add_hooks(self.many, comm)
        self.one = row.make_optimizer().setup(self.models.whole)
        row.add_hooks(self.one, None)
        self.alone = OneProcess(kind, self.one, steps)

    def update(self, number):
        self.many.update(self.models.mine, *batch(self.place.batch, number))
        self.alone.update(*joint_batch(self.place.num_batches, number))

    def change(self, change):
        self.flush()  # gradients in flight would be dropped
        change(self.many)
        change(self.alone)

    def flush(self):
        if self.row.wrap is exchanging:
            self.many.flush()
        self.alone.flush()

    def share_first(self):
        """Each rank may draw weights; rank 0's are taken."""
        rank = self.place.mean.rank
        examples = batch(rank, UPDATES)
        mine = self.models.mine
        seeded(rank, self.many.update, mine, *examples)
        seeded(0, self.models.whole, *examples)
        assert parameter_bits(mine) == parameter_bits(self.models.whole)

    def differences(self):
        """What is other than on other ranks or in one process, in words (collective)."""
        mine = self.models.mine
        words = []
        if not same_everywhere(self.place.mean, mine):
            words.append("bits of ranks")
        for name in "t", "_loss_scale":
            found = getattr(self.many, name)
            expected = getattr(self.one, name)
            if found != expected:
                words.append(f"{name}: {found}, not {expected}")
        for arrays_of in parameters, float32_parameters:
            expected = arrays_of(self.models.held)
            found = arrays_of(mine)
            if found.keys() != expected.keys():
                words.append(f"names: {[*found]}, not {[*expected]}")
                continue
            for name, array in found.items():
                part = own_part(expected[name], array.shape, self.place.model)
                if not self.is_near(array, part):
                    words.append(f"{name}: {array}, not {part}")
        return words

    def is_near(self, array, other):
        has_dtype = array.dtype == other.dtype
        return has_dtype and np.allclose(array, other, 0, self.tolerance)


def own_part(array, shape, group):
    """This rank's part, of that shape, of an array that a group may hold in parts."""
    for axis, size in enumerate(array.shape):
        if shape[axis] != size:
            return np.array_split(array, group.size, axis)[group.rank]
    return array


def assert_none(comm, differences):
    """On all ranks, so that no rank goes on alone (collective)."""
    assert comm.allgather_obj(differences) == [[]] * comm.size


@pytest.mark.parametrize(("name", "kind", "steps"), cases())
def test_ranks_train_as_one_process_does(comm, name, kind, steps):
    """And have the same bits after every update, whatever the paths to a parameter."""
    row = ROWS[name]
    with using_config("dtype", np.dtype(row.dtype)), np.errstate(all="ignore"):
        training = Training(row, comm, kind, steps)
        if row.shares_first:
            training.share_first()
        for number in range(UPDATES):
            if number in row.changes:
                training.change(row.changes[number])
            training.update(number)
            assert_none(comm, training.differences())
        training.flush()
        assert_none(comm, training.differences())
    if row.overflows:
        param = next(training.models.mine.params())
        assert param.update_rule.t < training.one.t
    if row.wrap is exchanging:
        training.many.finalize()

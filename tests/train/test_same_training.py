"""Training that is interrupted and resumed is the same: whatever is trained, wherever kept."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, ChainList, Parameter, optimizers, training, using_config
from chainer.iterators import (
    MultiprocessIterator,
    MultithreadIterator,
    SerialIterator,
    ShuffleOrderSampler,
)
from chainer.serializers import load_npz
from chainer.training import StandardUpdater, Trainer, extensions
from numpy.random import RandomState

from chainermn_train import (
    DistributedOrderSampler,
    create_multi_node_checkpointer,
    create_multi_node_optimizer,
    multi_node_snapshot,
)
from tests.support.oracles.samples import alike
from tests.support.plugins.pairwise import pairwise, tiered
from tests.support.training.checkpoints import files, run_until
from tests.support.training.trainers import (
    parameter_bits,
    same_everywhere,
    state_of,
)

# Nothing here can tell whether files have reached the disk, which takes most of the
# time.
pytestmark = [
    pytest.mark.world,
    pytest.mark.usefixtures("unsynced", "forkserver"),
    pytest.mark.filterwarnings("ignore:Non finite number found in param.grad"),
]

# iterations
SAVED = 4
STOP = 8


class Net(Chain):
    """Two layers in use, and what no forward uses before iteration `begin`."""

    def __init__(self, rank, begin=None):
        super().__init__()
        random = RandomState(rank)
        self.calls = 0
        self.begin = begin
        with self.init_scope():
            self.first = L.Linear(3, 4, initialW=random.uniform(-1, 1, (4, 3)))
            self.last = L.Linear(4, 1, initialW=random.uniform(-1, 1, (1, 4)))
            if begin is not None:
                self.late = L.Linear(None, 4, initialW=0.5)
                self.norm = L.BatchNormalization(axis=0)
                self.slope = Parameter(0.25)

    def __call__(self, x):
        h = F.tanh(self.first(x))
        if self.begin is not None and self.calls >= self.begin:
            if not self.slope.is_initialized:
                self.slope.initialize((4,))
            h = self.norm(self.late(h)) * F.broadcast_to(self.slope, h.shape)
        self.calls += 1
        return F.mean(self.last(h) ** 2)

    def serialize(self, serializer):
        super().serialize(serializer)
        self.calls = int(serializer("calls", self.calls))


class Layers(ChainList):
    """Links, one after the other."""

    def __call__(self, x):
        for link in self:
            x = link(x)
        return F.mean(x)


# Where it is kept.


def by_checkpointer(comm, run, background=False):
    checkpointer = create_multi_node_checkpointer("run", comm, background=background)
    run.trainer.extend(checkpointer, trigger=(SAVED, "iteration"))
    checkpointer.maybe_load(run.trainer)


def in_the_background(comm, run):
    by_checkpointer(comm, run, background=True)


def by_updater(comm, run):
    """As a loop without a trainer does."""
    checkpointer = create_multi_node_checkpointer("run", comm, path=run.trainer.out)
    checkpointer.maybe_load(run.trainer.updater)
    run.trainer.extend(
        lambda trainer: checkpointer.save(trainer.updater),
        "save",
        trigger=(SAVED, "iteration"),
    )


def by_snapshot(comm, run):
    snapshot = multi_node_snapshot(
        comm, extensions.snapshot(autoload=True), range(comm.size)
    )
    run.trainer.extend(snapshot, trigger=(SAVED, "iteration"))


def by_chainer(comm, run):
    """Each rank's own snapshot, by Chainer alone."""
    name = f"snapshot of {comm.rank}"
    path = f"{run.trainer.out}/{name}"
    run.trainer.extend(extensions.snapshot(filename=name), trigger=(SAVED, "iteration"))
    if os.path.exists(path):
        load_npz(path, run.trainer)
        # Otherwise the next update drops what is in flight.
        run.optimizer.assume_synchronized()


STORES = {
    "checkpointer": by_checkpointer,
    "in the background": in_the_background,
    "updater": by_updater,
    "snapshot": by_snapshot,
    "chainer": by_chainer,
}

# What is trained.


def in_order(comm, examples):
    return SerialIterator(examples, 2, shuffle=False)


def shuffled(comm, examples):
    return SerialIterator(examples, 2)


def by_own_generator(comm, examples):
    sampler = ShuffleOrderSampler(RandomState(5))
    return SerialIterator(examples, 2, order_sampler=sampler)


def by_threads(comm, examples):
    return MultithreadIterator(examples, 2, shuffle=False)


def dealt(comm, examples, kind=SerialIterator, **options):
    """Several epochs, which prefetching iterators mix up most easily."""
    sampler = DistributedOrderSampler(comm, 1)
    few = examples[: 2 * comm.size]
    return kind(few, 1, order_sampler=sampler, **options)


def dealt_by_threads(comm, examples):
    return dealt(comm, examples, MultithreadIterator)


def dealt_by_workers(comm, examples):
    return dealt(comm, examples, MultiprocessIterator, n_processes=1)


@dataclass
class Case:
    """A kind of training."""

    make_optimizer: Callable[[], Any] = optimizers.MomentumSGD
    begin: int | None = None  # when more links come into use
    prepare: Callable[[Any], Any] = lambda run: None
    iterate: Callable[[Any, Any], Any] = in_order
    precision: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)
    layers: list[Any] | None = None  # of another model than `Net`


class Run:
    """A training of a rank: its model, optimizer and trainer, which goes on from what is there."""

    def __init__(self, comm, out, case, store, wrap=create_multi_node_optimizer):
        mixed = case.precision == "mixed16"
        if mixed:
            dtype = chainer.mixed16
        else:
            dtype = np.dtype(case.precision)
        examples = RandomState(comm.rank).uniform(-1, 1, (12, 3))
        with using_config("dtype", dtype):
            examples = examples.astype(chainer.get_dtype(map_mixed16=np.float16))
            self.model = Net(comm.rank, case.begin)
        if case.layers is not None:
            self.model = Layers(*case.layers).copy("init")
        actual = case.make_optimizer()
        if mixed:
            actual.use_fp32_update()
            actual.loss_scaling(interval=3)
        self.optimizer = wrap(actual, comm, **case.options).setup(self.model)
        np.random.seed(comm.rank)
        iterator = case.iterate(comm, examples)
        updater = StandardUpdater(iterator, self.optimizer)
        self.trainer = Trainer(updater, (STOP, "iteration"), out=str(out))
        case.prepare(self)
        STORES[store](comm, self)


def settings(model):
    rules = {name: it.update_rule for name, it in sorted(model.namedparams())}
    return {
        name: (rule.t, rule.enabled, str(rule.hyperparam.get_dict()))
        for name, rule in rules.items()
    }


def assert_resumes_the_same(comm, folder, case, store, *wrap):
    whole = Run(comm, folder / "whole", case, store, *wrap)
    whole.trainer.run()
    run_until(Run(comm, folder / "run", case, store, *wrap).trainer, SAVED + 1)
    comm.allgather_obj(None)
    resumed = Run(comm, folder / "run", case, store, *wrap)
    begun = []

    def note(trainer):
        begun.append(trainer.updater.iteration)

    resumed.trainer.extend(
        note,
        name="begun",
        trigger=lambda _: True,  # which has no state
    )
    resumed.trainer.run()
    assert begun[0] == SAVED + 1
    assert alike(state_of(resumed.optimizer), state_of(whole.optimizer))
    assert parameter_bits(resumed.model) == parameter_bits(whole.model)
    assert settings(resumed.model) == settings(whole.model)


def at(iteration):
    """Makes an extension of a function that is called once, with the run."""

    def decorate(change):
        def prepare(run):
            trigger = training.triggers.ManualScheduleTrigger(iteration, "iteration")
            run.trainer.extend(lambda _: change(run), "change", trigger=trigger)

        return prepare

    return decorate


def by_extension(kind, *arguments, **options):

    def extend(run):
        return run.trainer.extend(
            getattr(extensions, kind)(*arguments), trigger=(1, "iteration"), **options
        )

    return extend


@at(3)
def halve(run):
    run.optimizer.lr *= 0.5


@at(3)
def give_one_parameter_its_own(run):
    run.model.first.W.update_rule.hyperparam.lr = 0.01


def take_one_parameters_own_away(run):
    own = run.model.first.W.update_rule.hyperparam
    own.lr = 0.01
    at(3)(lambda _: delattr(own, "lr"))(run)


@at(3)
def freeze(run):
    run.model.first.disable_update()


def thaw(run):
    run.model.first.disable_update()
    at(3)(lambda run: run.model.first.enable_update())(run)


@at(3)
def set_a_numpy_number(run):
    run.optimizer.lr = np.float64(0.3)  # whose product with float32 is float64


@at(3)
def give_each_element_its_own(run):
    bias = run.model.first.b
    bias.update_rule.hyperparam.lr = np.linspace(0.1, 0.2, bias.size, dtype="f")


CHANGERS = {
    "WarmupShift": by_extension("WarmupShift", "lr", 0.01, 3, 0.1),
    "WarmupShift from what is set": by_extension("WarmupShift", "lr", None, 6, 0.5),
    "MultistepShift": by_extension("MultistepShift", "lr", 0.5, [2, 6], 0.1),
    "ExponentialShift": by_extension("ExponentialShift", "lr", 0.8),
    "LinearShift": by_extension("LinearShift", "momentum", (0.5, 0.9), (1, 7)),
    "halve": halve,
    "give one parameter its own": give_one_parameter_its_own,
    "take one parameter's own away": take_one_parameters_own_away,
    "freeze": freeze,
    "thaw": thaw,
    "a NumPy number": set_a_numpy_number,
    "give each element its own": give_each_element_its_own,
    # It is initialised late, too.
    "a late extension": by_extension(
        *("WarmupShift", "lr", 0.01, 3, 0.1), priority=-150
    ),
}
OPTIMIZERS = {
    name: each
    for name, each in vars(optimizers).items()
    if isinstance(each, type) and issubclass(each, chainer.GradientMethod)
}
SETTINGS = {
    name: Case(lambda: optimizers.MomentumSGD(lr=0.2), prepare=change)
    for name, change in CHANGERS.items()
}
LATE = {
    f"{name} of links from {begin} on": Case(OPTIMIZERS[name], begin)
    for name in ("Adam", "MomentumSGD", "SGD")
    for begin in (SAVED + 2, STOP + 1)
}
# Saved within an accumulation, with gradients in flight.
ACCUMULATED = {"accumulate_steps": 3}
BUFFERED = {"double_buffering": True}
EXCHANGES = {
    "accumulated": Case(optimizers.Adam, options=ACCUMULATED),
    "buffered": Case(optimizers.Adam, options=BUFFERED),
    "buffered, mixed": Case(precision="mixed16", options=BUFFERED),
    "all, mixed": Case(precision="mixed16", options=ACCUMULATED | BUFFERED),
    "all, float16": Case(precision="float16", options=ACCUMULATED | BUFFERED),
    "all": Case(optimizers.Adam, options=ACCUMULATED | BUFFERED),
}
ITERATORS = {
    each.__name__: Case(iterate=each)
    for each in (
        dealt_by_workers,
        shuffled,
        by_own_generator,
        by_threads,
        dealt,
        dealt_by_threads,
    )
}
CASES = {
    **{name: Case(each) for name, each in OPTIMIZERS.items()},
    **SETTINGS,
    **LATE,
    **EXCHANGES,
    **ITERATORS,
}
RESUMED = [
    *(("checkpointer", name) for name in CASES),
    *(("snapshot", name) for name in SETTINGS | EXCHANGES),
    *(("chainer", name) for name in EXCHANGES),
    *(("updater", name) for name in ("all", "freeze")),
    *(("in the background", name) for name in ("all", "all, mixed", "shuffled")),
    *(("snapshot", name) for name in ("MSVAG", "Adam of links from 6 on")),
]


@pytest.mark.parametrize(
    ("store", "name"), tiered(RESUMED, ["snapshot"], sorted(OPTIMIZERS | LATE))
)
def test_resumed_training_ends_with_the_bits_of_uninterrupted_training(
    naive, folder, store, name
):
    assert len(OPTIMIZERS) == 15
    assert_resumes_the_same(naive, folder, CASES[name], store)


@pairwise(store=["checkpointer", "snapshot"], name=["MSVAG", "freeze", "halve", *LATE])
def test_a_plain_optimizer_in_a_trainer_resumes_the_same(naive, tmp_path, store, name):
    """As in model parallelism: each rank's own."""
    with naive.split(naive.rank, 0) as alone:
        assert_resumes_the_same(alone, tmp_path, CASES[name], store, lambda it, _: it)


@pytest.mark.ci
@pytest.mark.sizes(4)
@pairwise(store=["checkpointer", "snapshot"], name=["accumulated", "buffered"])
def test_an_optimizer_over_ranks_of_the_same_part_resumes_the_same(
    naive, folder, store, name
):
    """As in data x model parallelism: the other two ranks hold another part."""
    with naive.split(naive.rank % 2, 0) as replicas:

        def wrap(actual, _, **options):
            return create_multi_node_optimizer(actual, replicas, **options)

        assert_resumes_the_same(naive, folder, CASES[name], store, wrap)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_alike_after_synchronize(naive, name):
    """Ranks may have updated differently often, and have frozen other layers."""
    model = Net(naive.rank)
    actual = OPTIMIZERS[name]().setup(model)
    for number in range(2 + naive.rank):
        actual.update(model, np.full((2, 3), number - 0.5, "f4"))
    optimizer = create_multi_node_optimizer(actual, naive)
    if naive.rank:
        model.last.disable_update()
    optimizer.synchronize()
    for number in range(3):
        optimizer.update(model, np.full((2, 3), number + naive.rank, "f4"))
        assert same_everywhere(naive, model)
    everyones = naive.allgather_obj(settings(model))
    for each in everyones:
        assert each == everyones[0]
    assert model.first.W.update_rule.t == 5


@pytest.mark.parametrize("store", ["checkpointer", "snapshot"])
def test_a_value_that_the_script_sets_otherwise_is_replaced_and_named_once(
    naive, folder, capfd, store
):
    def make(lr):
        return Run(naive, folder, Case(lambda: optimizers.SGD(lr=lr)), store)

    run_until(make(0.25).trainer, SAVED + 1)
    naive.allgather_obj(None)
    capfd.readouterr()
    resumed = make(0.5)
    resumed.trainer.run()
    said = capfd.readouterr().err
    assert said.count("set it in an extension") == (naive.rank == 0)
    assert naive.rank or "lr of hyperparameters: 0.25 (here: 0.5)" in said
    assert resumed.optimizer.lr == 0.25


# Another model or optimizer.


def layers(count, *more):
    return [*[L.Linear(3, 3, initialW=0.5) for _ in range(count)], *more]


def of(name, *made):
    layers = None
    if made:
        layers = made[0]
    return Case(OPTIMIZERS[name], layers=layers)


NORM = L.BatchNormalization(3)
# What was saved, what it is loaded into, and words of the error.
OTHERS = {
    "a layer less": (of("Adam", layers(3)), of("Adam", layers(2)), "2/W"),
    "a layer more": (of("Adam", layers(2)), of("Adam", layers(3)), "2/W"),
    "statistics less": (of("SGD", layers(2, NORM)), of("SGD", layers(2)), "avg_mean"),
    "statistics more": (of("SGD", layers(2)), of("SGD", layers(2, NORM)), "2/"),
    **{
        f"{there} to {here}": (of(there), of(here), f"{there}.*{here}")
        for there, here in [
            *(("Adam", "MomentumSGD"), ("SGD", "Adam"), ("AdamW", "Adam")),
            *(("MomentumSGD", "NesterovAG"), ("AMSGrad", "Adam")),
        ]
    },
}


@pairwise(store=["checkpointer", "snapshot"], case=OTHERS)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(
    naive, folder, store, case
):
    saved, other, words = OTHERS[case]
    run_until(Run(naive, folder, saved, store).trainer, SAVED + 1)
    before = files(naive, folder)
    with pytest.raises(ValueError, match=words):
        Run(naive, folder, other, store).trainer.run()
    assert files(naive, folder) == before
    trainer = Run(naive, folder, saved, store).trainer
    trainer.run()
    assert trainer.updater.iteration == STOP


def test_fewer_extensions_and_another_end_are_no_other_model(naive, folder):
    first = Run(naive, folder, Case(), "checkpointer")
    first.trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    run_until(first.trainer, SAVED + 1)
    naive.allgather_obj(None)
    trainer = Run(naive, folder, Case(), "checkpointer").trainer
    assert trainer.updater.iteration == SAVED
    trainer.stop_trigger = lambda trainer: trainer.updater.iteration == 6
    trainer.run()
    assert trainer.updater.iteration == 6

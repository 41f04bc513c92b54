"""A resumed training is the same training: optimizers, hyperparameters, links without values."""

from __future__ import annotations

import itertools

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizers, training
from chainer.training import extensions

from chainermn_train import (
    create_multi_node_checkpointer,
    create_multi_node_optimizer,
    multi_node_snapshot,
)
from tests.support.plugins.pairwise import pairwise
from tests.support.training.checkpoints import files, run_until
from tests.support.training.trainers import (
    parameter_bits,
    same_everywhere,
    trainer_over,
)

# Nothing here can tell whether files have reached the disk, which takes most of the
# time.
pytestmark = [
    pytest.mark.world,
    pytest.mark.ci,
    pytest.mark.usefixtures("unsynced"),
]

SAVED, STOP = 4, 8  # iterations

# What one list of all that ranks have alike will mend.
SLOTS = pytest.mark.xfail(strict=True, reason="comes with the list of slots")


class Net(chainer.Chain):
    """Two layers in use, and what no forward uses before iteration `begin`."""

    def __init__(self, rank, begin=None):
        super().__init__()
        random = np.random.RandomState(rank)
        self.calls = 0
        self.begin = begin
        with self.init_scope():
            self.first = L.Linear(3, 4, initialW=random.uniform(-1, 1, (4, 3)))
            self.last = L.Linear(4, 1, initialW=random.uniform(-1, 1, (1, 4)))
            if begin is not None:
                self.late = L.Linear(None, 4, initialW=0.5)
                self.norm = L.BatchNormalization(axis=0)
                self.slope = chainer.Parameter(0.25)

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


class Both:
    """What a loop without a trainer saves."""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def serialize(self, serializer):
        self.model.serialize(serializer["model"])
        self.optimizer.serialize(serializer["optimizer"])


def by_checkpointer(comm, trainer):
    checkpointer = create_multi_node_checkpointer("run", comm)
    trainer.extend(checkpointer, trigger=(SAVED, "iteration"))
    checkpointer.maybe_load(trainer)


def by_snapshot(comm, trainer):
    snapshot = multi_node_snapshot(comm, extensions.snapshot(autoload=True), [])
    trainer.extend(snapshot, trigger=(SAVED, "iteration"))


STORES = {"checkpointer": by_checkpointer, "snapshot": by_snapshot}


class Run:
    """A training of a rank: its model, optimizer and trainer, which goes on from what is there."""

    def __init__(self, comm, out, actual, store, plain=False, **how):
        self.model = Net(comm.rank, how.get("begin"))
        self.optimizer = actual
        if not plain:
            self.optimizer = create_multi_node_optimizer(actual, comm)
        self.optimizer.setup(self.model)
        # Equal on all ranks, so that snapshots are; their means still have other bits.
        examples = np.random.RandomState(0).uniform(-1, 1, (6, 3)).astype("f4")
        self.trainer = trainer_over(
            examples, 2, self.optimizer, (STOP, "iteration"), out
        )
        how.get("prepare", lambda _: None)(self)
        STORES[store](comm, self.trainer)

    def result(self):
        """All that training has changed."""
        return parameter_bits(self.model), settings(self.model)


def settings(model):
    rules = {name: it.update_rule for name, it in sorted(model.namedparams())}
    return {
        name: (rule.t, rule.enabled, rule.hyperparam.get_dict())
        for name, rule in rules.items()
    }


def alone_if_plain(comm, folder, tmp_path, plain):
    """The communicator and folder of a rank's training by a plain optimizer: its own."""
    return (comm.split(comm.rank, 0), tmp_path) if plain else (comm, folder)


def assert_resumes_the_same(comm, folder, make):
    """Interrupted after a save and resumed, as `make(out)` makes it, it ends as it would have."""
    whole = make(folder / "whole")
    whole.trainer.run()
    run_until(make(folder / "run").trainer, SAVED + 1)
    resumed = make(folder / "run")
    begun = []
    resumed.trainer.extend(
        lambda trainer: begun.append(trainer.updater.iteration),
        name="begun",
        trigger=lambda _: True,  # which has no state
    )
    resumed.trainer.run()
    assert begun[0] == SAVED + 1
    assert resumed.result() == whole.result()


@pairwise(
    store=STORES,
    optimizer=["Adam", "MomentumSGD", "SGD"],
    plain=[False, True],
    begin=[SAVED + 2, STOP + 1],
)
def test_a_link_without_values_when_it_was_saved_is_loaded(
    naive, folder, tmp_path, store, optimizer, plain, begin
):
    """Whether it is used later or never; a plain optimizer steps on its rank alone."""

    def make(out):
        actual = getattr(optimizers, optimizer)()
        return Run(naive, out, actual, store, plain, begin=begin)

    naive, own = alone_if_plain(naive, folder, tmp_path, plain)
    assert_resumes_the_same(naive, own, make)


@pytest.mark.parametrize("store", ["checkpointer", "load_npz"])
def test_a_link_without_values_is_loaded_without_a_trainer(naive, folder, store):
    def make():
        actual = optimizers.Adam(alpha=0.1)
        optimizer = create_multi_node_optimizer(actual, naive).setup(
            Net(naive.rank, begin=5)
        )
        return optimizer, Both(optimizer.target, optimizer)

    def update(optimizer, start, stop):
        for number in range(start, stop):
            x = np.random.RandomState((number, naive.rank)).uniform(-1, 1, (2, 3))
            optimizer.update(optimizer.target, x.astype("f4"))

    whole, both = make()
    update(whole, 0, 3)
    path = folder / f"{naive.rank}.npz"
    if store == "load_npz":
        chainer.serializers.save_npz(path, both)
    else:
        create_multi_node_checkpointer("run", naive, path=folder).save(both)
    resumed, both = make()
    if store == "load_npz":
        chainer.serializers.load_npz(path, both)
        resumed.assume_synchronized()
    else:
        checkpointer = create_multi_node_checkpointer("run", naive, path=folder)
        checkpointer.maybe_load(both, resumed)
    update(whole, 3, 8)
    update(resumed, 3, 8)
    assert parameter_bits(resumed.target) == parameter_bits(whole.target)
    assert same_everywhere(naive, whole.target)


OPTIMIZERS = {
    name: each
    for name, each in vars(optimizers).items()
    if isinstance(each, type) and issubclass(each, chainer.GradientMethod)
}


@pairwise(store=STORES, optimizer=OPTIMIZERS)
def test_every_optimizer_resumes_with_the_same_bits(naive, folder, store, optimizer):
    assert len(OPTIMIZERS) == 15
    assert_resumes_the_same(
        naive, folder, lambda out: Run(naive, out, OPTIMIZERS[optimizer](), store)
    )


def updated_differently(comm, actual):
    """A multi-node optimizer whose rules have made more updates on higher ranks."""
    model = Net(comm.rank)
    actual.setup(model)
    for number in range(2 + comm.rank):
        actual.update(model, np.full((2, 3), number - 0.5, "f4"))
    return create_multi_node_optimizer(actual, comm)


def assert_goes_on_alike(comm, optimizer):
    for number in range(3):
        optimizer.update(optimizer.target, np.full((2, 3), number + comm.rank, "f4"))
        assert same_everywhere(comm, optimizer.target)
    everyones = comm.allgather_obj(settings(optimizer.target))
    assert all(each == everyones[0] for each in everyones)
    assert optimizer.target.first.W.update_rule.t == 5


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_goes_on_alike_after_synchronize(naive, optimizer):
    """Ranks may have updated differently often, and have frozen other layers."""
    synchronized = updated_differently(naive, OPTIMIZERS[optimizer]())
    if naive.rank:
        synchronized.target.last.disable_update()
    synchronized.synchronize()
    assert_goes_on_alike(naive, synchronized)


@SLOTS
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("of", ["all", "one parameter"])
def test_hyperparameters_are_alike_after_synchronize(naive, of):
    synchronized = updated_differently(naive, optimizers.MomentumSGD())
    own = synchronized.target.last.W.update_rule.hyperparam
    holder = synchronized.hyperparam if of == "all" else own
    holder.lr = 0.1 / (1 + naive.rank)
    synchronized.synchronize()
    assert_goes_on_alike(naive, synchronized)


def at(iteration):
    """Makes an extension of a function that is called once, with the run."""

    def decorate(change):
        def prepare(run):
            trigger = training.triggers.ManualScheduleTrigger(iteration, "iteration")
            run.trainer.extend(lambda _: change(run), "change", trigger=trigger)

        return prepare

    return decorate


def by_extension(kind, *arguments):
    return lambda run: run.trainer.extend(
        getattr(extensions, kind)(*arguments), trigger=(1, "iteration")
    )


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


def shift_after_others(run):
    """An extension that is initialised late, too."""
    shift = extensions.WarmupShift("lr", 0.01, 3, 0.1)
    run.trainer.extend(shift, trigger=(1, "iteration"), priority=-150)


CHANGERS = {
    "WarmupShift": by_extension("WarmupShift", "lr", 0.01, 3, 0.1),
    "WarmupShift from what is set": by_extension("WarmupShift", "lr", None, 6, 0.5),
    "MultistepShift": by_extension("MultistepShift", "lr", 0.5, [2, 6], 0.1),
    "MultistepShift from what is set": by_extension(
        *("MultistepShift", "lr", 0.5, [2, 6], None)
    ),
    "ExponentialShift": by_extension("ExponentialShift", "lr", 0.8),
    "LinearShift": by_extension("LinearShift", "momentum", (0.5, 0.9), (1, 7)),
    "StepShift": by_extension("StepShift", "lr", 0.5, 3),
    "InverseShift": by_extension("InverseShift", "lr", 0.5, 1),
    "PolynomialShift": by_extension("PolynomialShift", "lr", 0.5, 9),
    "halve": halve,
    "give one parameter its own": give_one_parameter_its_own,
    "take one parameter's own away": take_one_parameters_own_away,
    "freeze": freeze,
    "thaw": thaw,
    "a NumPy number": set_a_numpy_number,
    "a late extension": shift_after_others,
}


# Those that Chainer's extensions keep, and a checkpointer loads before they begin.
KEPT_BY_EXTENSIONS = {
    *("ExponentialShift", "LinearShift", "StepShift", "InverseShift"),
    "PolynomialShift",
}


def is_restored(store, changer):
    by_chainer = store == "checkpointer" and changer in KEPT_BY_EXTENSIONS
    return by_chainer or changer in ("freeze", "thaw")


@pytest.mark.parametrize(
    ("store", "changer"),
    [
        pytest.param(*case, marks=[] if is_restored(*case) else SLOTS)
        for case in itertools.product(STORES, CHANGERS)
    ],
)
def test_settings_are_those_of_the_save(naive, folder, store, changer):
    assert_resumes_the_same(
        naive,
        folder,
        lambda out: Run(
            *(naive, out, optimizers.MomentumSGD(lr=0.2), store),
            prepare=CHANGERS[changer],
        ),
    )


@SLOTS
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("optimizer", "changer"),
    [("MSVAG", None), ("SGD", "freeze"), ("SGD", "halve")],
)
def test_a_plain_optimizer_in_a_trainer_resumes_the_same(
    naive, tmp_path, store, optimizer, changer
):
    """As in model parallelism: each rank's own."""
    with naive.split(naive.rank, 0) as alone:
        assert_resumes_the_same(
            alone,
            tmp_path,
            lambda out: Run(
                *(alone, out, OPTIMIZERS[optimizer](), store, True),
                prepare=CHANGERS.get(changer, lambda _: None),
            ),
        )


@SLOTS
@pytest.mark.parametrize("store", STORES)
def test_a_value_that_the_script_sets_otherwise_is_replaced_and_named_once(
    naive, folder, capfd, store
):
    def make(out, lr):
        return Run(naive, out, optimizers.SGD(lr=lr), store)

    run_until(make(folder, 0.25).trainer, SAVED + 1)
    capfd.readouterr()
    resumed = make(folder, 0.5)
    resumed.trainer.run()
    said = naive.allgather_obj(capfd.readouterr().err)
    assert [err.count("lr") for err in said] == [1] + [0] * (naive.size - 1)
    assert "0.25" in said[0]
    assert "0.5" in said[0]
    assert "set it in an extension" in said[0]
    assert resumed.optimizer.lr == 0.25


# Another model or optimizer.


class Layers(chainer.Chain):
    """So many layers, perhaps with batch normalization."""

    def __init__(self, count, norm=False):
        super().__init__()
        with self.init_scope():
            for number in range(count):
                setattr(self, f"layer{number}", L.Linear(3, 3, initialW=0.5))
            if norm:
                self.norm = L.BatchNormalization(3)

    def __call__(self, x):
        for number in range(3):
            x = getattr(self, f"layer{number}", F.identity)(x)
        return F.mean(getattr(self, "norm", F.identity)(x) ** 2)


def trainer_of(comm, out, store, model, optimizer, plain=False):
    actual = OPTIMIZERS[optimizer]()
    if not plain:
        actual = create_multi_node_optimizer(actual, comm)
    examples = np.ones((6, 3), "f4")
    trainer = trainer_over(examples, 2, actual.setup(model), (STOP, "iteration"), out)
    STORES[store](comm, trainer)
    return trainer


# What was saved, what it is loaded into, and words of the error.
OTHERS = {
    "a layer less": (Layers(3), "Adam", Layers(2), "Adam", "layer2/W"),
    "a layer more": (Layers(2), "Adam", Layers(3), "Adam", "layer2/W"),
    "statistics less": (Layers(2, True), "SGD", Layers(2), "SGD", "norm/avg_mean"),
    "statistics more": (Layers(2), "SGD", Layers(2, True), "SGD", "norm"),
    **{
        f"{there} to {here}": (Layers(2), there, Layers(2), here, f"{there}.*{here}")
        for there, here in [
            *(("Adam", "MomentumSGD"), ("Adam", "SGD"), ("SGD", "Adam")),
            *(("Adam", "AMSGrad"), ("AdamW", "Adam"), ("MomentumSGD", "NesterovAG")),
            *(("AMSGrad", "Adam"), ("MSVAG", "Adam"), ("RMSprop", "AdaGrad")),
        ]
    },
}


@pairwise(store=STORES, case=OTHERS)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(
    naive, folder, store, case
):
    saved, its_optimizer, target, optimizer, words = OTHERS[case]
    run_until(
        trainer_of(naive, folder, store, saved.copy("init"), its_optimizer),
        SAVED + 1,
    )
    before = files(naive, folder)
    with pytest.raises(ValueError, match=words):
        trainer_of(naive, folder, store, target.copy("init"), optimizer).run()
    assert files(naive, folder) == before
    trainer = trainer_of(naive, folder, store, saved.copy("init"), its_optimizer)
    trainer.run()
    assert trainer.updater.iteration == STOP


@pytest.mark.parametrize(
    ("there", "here", "missing"),
    [("Adam", "MomentumSGD", "layer0/W/m"), ("SGD", "Adam", "layer0/W/m")],
)
def test_a_plain_optimizers_state_is_not_that_of_another_kind(
    naive, tmp_path, there, here, missing
):
    with naive.split(naive.rank, 0) as alone:
        arguments = (alone, tmp_path, "checkpointer")
        run_until(trainer_of(*arguments, Layers(2), there, True), SAVED + 1)
        with pytest.raises(ValueError, match=missing):
            trainer_of(*arguments, Layers(2), here, True)


def test_a_model_alone_of_another_shape_is_refused_on_any_number_of_ranks(
    naive, folder
):
    create_multi_node_checkpointer("run", naive, path=folder).save(Layers(3))
    files(naive, folder)
    with naive.split(naive.rank, 0) as alone:
        for comm in naive, alone:
            checkpointer = create_multi_node_checkpointer("run", comm, path=folder)
            with pytest.raises(ValueError, match=r"layer2/W.*another model"):
                checkpointer.maybe_load(Layers(2))
            assert checkpointer.maybe_load(Layers(3)) == 1


def test_fewer_extensions_and_another_end_are_no_other_model(naive, folder):
    first = Run(naive, folder, optimizers.Adam(), "checkpointer")
    first.trainer.extend(extensions.LogReport(trigger=(1, "iteration")))
    run_until(first.trainer, SAVED + 1)
    resumed = Run(naive, folder, optimizers.Adam(), "checkpointer")
    assert resumed.trainer.updater.iteration == SAVED
    resumed.trainer.stop_trigger = lambda trainer: trainer.updater.iteration == 6
    resumed.trainer.run()
    assert resumed.optimizer.t == 6

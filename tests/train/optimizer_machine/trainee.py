"""One rank of a played training: tiny models, their optimizers, and all that may happen to them."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import chainer
import chainer.functions as F
import numpy as np
from chainer import Chain, Link, Parameter
from chainer.optimizer_hooks import GradientClipping, WeightDecay
from chainer.optimizers import SGD, Adam, MomentumSGD
from numpy.random import RandomState

from chainermn_comm import PeerError, create_communicator
from chainermn_modelparallel import allreduce
from chainermn_train import create_multi_node_optimizer, join
from tests.support.training.exchanges import KINDS
from tests.support.training.trainers import load_state, state_of

OPTIMIZERS = {
    "SGD": lambda: SGD(0.1),
    "MomentumSGD": lambda: MomentumSGD(0.1),
    "Adam": lambda: Adam(0.05),
}
# Ranks that a command may name.
NOBODY = range(0)
ALL = range(8)
# Where an update may fail: in the loss function, in its backward, or in the step.
IN_LOSS = ("forward", "backward")
IN_STEP = ("pre", "rule", "post")
NOWHERE: dict[int, str] = {}  # ranks that fail, and where
# Names of errors.
PLANTED = "PlantedError"
PEER = "PeerError"
MISMATCH = "RankMismatchError"
# What NumPy and Chainer say of gradients that aren't finite, and ours of an optimizer
# that another one takes the place of.
KNOWN_WARNINGS = (
    "Non finite number",
    "invalid value",
    "overflow",
    "divide by zero",
    "gradients are left that no step has used",
)
# What another backward than `update`'s own scales its loss by.
OWN_SCALE = 32.0


class PlantedError(Exception):
    """What fails as it should."""


@dataclass(frozen=True)
class Config:
    """How optimizers, their models and their communicator are made."""

    kind: str = "synchronous"
    steps: int = 1
    scaling: float | str | None = None  # "dynamic", or a static scale
    hooks: bool = False
    optimizer: str = "SGD"
    on_drift: str = "raise"
    zero_fill: bool = True
    dtype: str = "float32"  # of parameters
    float32_masters: bool = False
    wire_dtype: str | None = None
    is_lazy: bool = False  # whether a parameter has no values before it is used
    communicates: bool = False  # whether the loss does
    optimizers: int = 1
    groups: int = 1  # of ranks, which train apart

    @property
    def delay(self):
        return KINDS[self.kind].delay

    @property
    def is_sharded(self):
        return self.kind == "sharded"

    @property
    def is_narrow(self):
        return "float16" in (self.dtype, self.wire_dtype)


@dataclass(frozen=True)
class Outcome:
    """What came of a command on a rank."""

    error: str  # its class; "" for none
    text: str
    warned: list[str]
    optimizer: Any  # the actual one, with its model


def batch(number, rank):
    return RandomState((number, rank)).uniform(-1, 1, 2)


SHAPE = (1, 2)  # of a part's matrix


class Part(Link):
    """A matrix of two numbers, which a lazy one gets when it is used, and a number that is 0-d."""

    def __init__(self, dtype, is_lazy, *seed):
        super().__init__()
        random = RandomState((*seed, 7))  # others than a batch's numbers
        w, s = np.split(random.uniform(-1, 1, 3), [2])
        initial = w.astype(dtype).reshape(SHAPE)
        if is_lazy:
            initial = chainer.initializers.Constant(w[0], dtype)
        with self.init_scope():
            self.w = Parameter(initial)
            self.s = Parameter(np.array(s[0], dtype))

    def __call__(self, x):
        if not self.w.is_initialized:
            self.w.initialize(SHAPE)
        x = x.astype(self.s.dtype)
        return (F.sum((self.w - x.reshape(SHAPE)) ** 2) + (self.s - x[0]) ** 2) / 2


class Tiny(Chain):
    """Some parts, and a persistent array that each rank's own examples change."""

    def __init__(self):
        super().__init__()
        self.add_persistent("seen", np.zeros(2, "f"))

    def __call__(self, x, unused):
        self.seen += x
        return sum(part(x) for part in self.children() if part.name != unused)


class FailingBackward(chainer.FunctionNode):
    """The identity, whose backward raises."""

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, gradients):
        raise PlantedError("in backward")


@cache
def communicator(wire_dtype, groups):
    """Return this rank's, which is made at its first use (collective)."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return create_communicator(
        "hierarchical",
        world.Split(world.rank % groups),
        allreduce_grad_dtype=wire_dtype,
    )


class Trainee:
    """A rank's optimizer and model; `execute` calls one of the commands below it."""

    def __init__(self, rank, config):
        """Train on a ``rank`` of the world."""
        self._comm = communicator(config.wire_dtype, config.groups)
        self._rank = rank
        self._config = config
        self._saved: list[Any] = []
        self._optimizer = self._made(["first", "second"], 1, config.scaling)

    def execute(self, name, /, ranks=ALL, **kwds):
        """Return what comes of a command that some ranks are given."""
        error = ""
        text = ""
        whole = nullcontext()
        if name == "save":  # on some ranks, of states of which all have parts
            whole = self._optimizer.whole_states()
        with whole, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                if self._rank in ranks:
                    getattr(self, name)(**kwds)
            except Exception as raised:
                error = type(raised).__name__
                text = str(raised)
        told = [str(each.message) for each in caught]
        warned = [it for it in told if not any(known in it for known in KNOWN_WARNINGS)]
        with self._optimizer.whole_states():
            optimizer = deepcopy(self._optimizer.actual_optimizer)
        return Outcome(error, text, warned, optimizer)

    def begin(self):
        pass

    def update(
        self,
        number,
        unused=NOBODY,
        without_loss=NOBODY,
        overflowing=NOBODY,
        fails=NOWHERE,
    ):
        """Update, with ranks that do something else.

        Those ``without_loss`` call backward themselves.
        """
        place = fails.get(self._rank, "")
        skipped = ""
        if self._rank in unused:
            skipped = "second"
        overflows = self._rank in overflowing
        given = [number, skipped, place, overflows]
        with self._fault(place):
            if self._rank not in without_loss:
                self._optimizer.update(self._loss, *given)
                return
            loss = self._loss(*given)
            self._model.cleargrads()
            loss.backward(loss_scale=OWN_SCALE)
            self._optimizer.update()

    def join(self, number, counts, fails=NOWHERE, at=0):
        """Make as many updates in a block as this rank's count says.

        The one at this place fails on some ranks; all go on, and raise at the end.
        """
        errors = []
        with join(self._optimizer):
            for each in range(counts[self._rank % len(counts)]):
                try:
                    self.update(number + each, fails=fails if each == at else NOWHERE)
                except (PlantedError, PeerError) as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def flush(self, fails=NOWHERE):
        with self._fault(fails.get(self._rank)):
            self._optimizer.flush()

    def synchronize(self):
        self._optimizer.synchronize()

    def replace(self, number, name):
        """Have another part of this name, or one that was not there."""
        if hasattr(self._model, name):
            delattr(self._model, name)
        part = Part(self._config.dtype, False, number, self._rank)
        self._model.add_link(name, part)
        for param in part.params():
            param.update_rule = self._optimizer.create_update_rule()
            if self._config.float32_masters:
                param.update_rule.use_fp32_update()

    def setup(self, seed):
        """Train another model, with the same names."""
        self._set_up(self._optimizer, self._names, seed)

    def set_loss_scale(self, scale):
        self._optimizer.set_loss_scale(scale)

    def go_on_with_a_copy(self):
        old = self._optimizer
        self._optimizer = deepcopy(old)
        old.finalize()

    def save(self):
        things = self._model, self._optimizer
        states = [deepcopy(state_of(each)) for each in things]
        self._saved = [self._optimizer._loss_scale, *states]

    def renew(self):
        """Go on with a new model and optimizer."""
        old = self._optimizer
        self._optimizer = self._made(self._names, 99, old._loss_scale)
        old.finalize()

    def load(self, assume=False, broken=NOBODY):
        """Load what was saved, which is ``broken`` on some ranks."""
        scale, model, optimizer = self._saved
        if self._rank in broken:
            del optimizer["second/w/t"]
        self._set_scale(self._optimizer, scale)
        load_state(self._model, model)
        load_state(self._optimizer, optimizer)
        if assume:
            self._optimizer.assume_synchronized()

    def disturb(self, what):
        """Change a little, as a fault of a rank's memory would."""
        DISTURB[what](self._optimizer.actual_optimizer, self._model.second)

    def end(self):
        self._optimizer.finalize()

    # How it is done.

    @property
    def _model(self):
        return self._optimizer.target

    @property
    def _names(self):
        return sorted(part.name for part in self._model.children())

    def _loss(self, number, skipped="", place="", overflows=False):
        if place == "forward":
            raise PlantedError("in forward")
        loss = self._model(batch(number, self._rank), skipped)
        w = self._model.first.w
        if self._config.communicates:
            loss += 0 * F.sum(allreduce(self._comm, w))
        if overflows:
            loss += F.sum(w) * np.inf
        if place == "backward":
            loss += F.sum(FailingBackward().apply((w,))[0])
        return loss

    def _made(self, names, seed, scale):
        config = self._config
        optimizer = create_multi_node_optimizer(
            OPTIMIZERS[config.optimizer](),
            self._comm,
            accumulate_steps=config.steps,
            on_drift=config.on_drift,
            zero_fill=config.zero_fill,
            **KINDS[config.kind].arguments,
        )
        self._set_scale(optimizer, scale)
        if config.float32_masters:
            optimizer.use_fp32_update()
        self._set_up(optimizer, names, seed)
        return optimizer

    def _set_scale(self, optimizer, scale):
        if self._config.scaling == "dynamic":
            optimizer.loss_scaling(interval=2)
        elif scale is not None:
            optimizer.set_loss_scale(scale)

    def _set_up(self, optimizer, names, seed):
        model = Tiny()
        for number, name in enumerate(names):
            is_lazy = self._config.is_lazy and name == "second"
            part = Part(self._config.dtype, is_lazy, seed, self._rank, number)
            model.add_link(name, part)
        optimizer.setup(model)
        if self._config.hooks:
            optimizer.add_hook(WeightDecay(1e-3))
            optimizer.add_hook(GradientClipping(0.5))

    @contextmanager
    def _fault(self, place):
        """Let the next step fail: in a "pre" or "post" hook, or in an update "rule"."""
        if place not in IN_STEP:
            yield
            return
        left = [place]

        def fail(*_):
            if left:
                raise PlantedError(f"in {left.pop()}")
            return 0.0

        if self._config.is_sharded:  # which knows some of Chainer's hooks alone
            fail = WeightDecay(Rate(fail))
            place = place.replace("post", "pre")
        hooked = self._optimizer
        timing = place
        if place == "rule":  # other rules come before this one, and others after it
            hooked = self._model.first.s.update_rule
            timing = "pre"
        hooked.add_hook(fail, name="planted", timing=timing)
        try:
            yield
        finally:
            hooked.remove_hook("planted")


class Rate:
    """A hook's number that calls a function where it is used."""

    def __init__(self, call):
        self._call = call

    def __mul__(self, other):
        return self._call() * other

    __rmul__ = __mul__


def _flip(array):
    """Change the lowest bits of an element."""
    array.reshape(-1).view(np.uint8)[0] ^= 1


def _add_one(thing, name):
    setattr(thing, name, getattr(thing, name) + 1)


def _count_step(optimizer, part):
    rule = part.w.update_rule
    if rule.t > 0:  # a rule without steps has no state, which the count would promise
        rule.t += 1


def _flip_moments(optimizer, part):
    for array in (part.w.update_rule.state or {}).values():
        _flip(array)


def disturb_parameter(optimizer, part):
    return _flip(part.w.array)


def disturb_0_d(optimizer, part):
    return _flip(part.s.array)


def disturb_t(optimizer, part):
    return _add_one(optimizer, "t")


def disturb_epoch(optimizer, part):
    return _add_one(optimizer, "epoch")


def disturb_loss_scale(optimizer, part):
    return _add_one(optimizer, "_loss_scale")


def disturb_persistent(optimizer, part):
    return _add_one(optimizer.target, "seen")


# What a command `disturb` does to Chainer's optimizer and the second part.
DISTURB = {
    "parameter": disturb_parameter,
    "0-d": disturb_0_d,
    "momentum": _flip_moments,
    "rule's t": _count_step,
    "t": disturb_t,
    "epoch": disturb_epoch,
    "loss scale": disturb_loss_scale,
    "persistent": disturb_persistent,
}

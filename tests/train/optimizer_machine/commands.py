"""One rank of a drawn training: a tiny model, its optimizer, and all that may happen to them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import chainer
import chainer.functions as F
import numpy as np
from chainer.optimizer_hooks import GradientClipping, WeightDecay

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import create_multi_node_optimizer
from tests.support.training.exchanges import KINDS, states
from tests.support.training.trainers import load_state, state_of

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: chainer.optimizers.SGD(0.1),
    "MomentumSGD": lambda: chainer.optimizers.MomentumSGD(0.1),
    "Adam": lambda: chainer.optimizers.Adam(0.05),
}
ERRORS = ((PeerError, "peer"), (RankMismatchError, "mismatch"))
# What NumPy and Chainer say of gradients that aren't finite.
OF_OVERFLOWS = ("Non finite number", "invalid value", "overflow", "divide by zero")
# What ours says of an optimizer that another one takes the place of.
OF_LEFTOVERS = "gradients are left that no step has used"


class PlantedError(Exception):
    """What fails as it should."""


@dataclass(frozen=True)
class Config:
    """How an optimizer is made."""

    kind: str = "synchronous"
    steps: int = 1
    scaling: float | str | None = None  # "dynamic", or a static scale
    hooks: bool = False
    optimizer: str = "SGD"
    on_drift: str = "raise"


class Outcome(NamedTuple):
    """What came of a command on a rank."""

    error: str  # "planted", "peer", "mismatch", "" or another one's class
    text: str
    warned: str
    t: int
    # Parameters, update rules' state and t, t, epoch, loss scale.
    state: dict[str, bytes | None]
    persistent: bytes


class Part(chainer.Link):
    """Two numbers, and one that is 0-d."""

    def __init__(self, *seed: int) -> None:
        super().__init__()
        random = np.random.RandomState(seed)
        with self.init_scope():
            self.w = chainer.Parameter(random.uniform(-1, 1, 2).astype("f"))
            self.s = chainer.Parameter(np.array(random.uniform(-1, 1), "f"))

    def __call__(self, x: Any) -> Any:
        return (F.sum((self.w - x) ** 2) + (self.s - x[0]) ** 2) / 2


class Tiny(chainer.Chain):
    """Some parts, and a persistent array that each rank's own examples change."""

    def __init__(self, seeds: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, seed in seeds.items():
            self.add_link(name, Part(*seed))
        self.add_persistent("seen", np.zeros(2, "f"))

    def __call__(self, x: Any, unused: str = "") -> Any:
        self.seen += x
        return sum(part(x) for part in self.children() if part.name != unused)


class FailingBackward(chainer.FunctionNode):
    """The identity, whose backward raises."""

    def forward(self, inputs: Any) -> Any:
        return inputs

    def backward(self, indexes: Any, gradients: Any) -> Any:
        raise PlantedError("in backward")


class OneRank:
    """Executes commands; each returns an outcome, whatever it raised."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._rank = comm, comm.rank
        self._optimizer: Any = None

    @property
    def _model(self) -> Any:
        return self._optimizer.target

    def begin(self, config: Config, seed: int) -> Outcome:
        self._config, self._scale = config, config.scaling
        self._optimizer = self._made(
            {"first": (seed, self._rank), "second": (seed, self._rank, 1)}
        )
        return self._outcome()

    def end(self) -> Outcome:
        return self._outcome(self._optimizer.finalize)

    def update(
        self,
        number: int,
        without_loss: tuple[int, ...] = (),
        unused: tuple[int, ...] = (),
        overflowing: tuple[int, ...] = (),
        failing: tuple[int, ...] = (),
        where: str = "forward",
    ) -> Outcome:
        """Update, with ranks that do something else; those that fail do so there."""
        x = np.random.RandomState((number, self._rank)).uniform(-1, 1, 2).astype("f")
        fails = self._rank in failing

        def lossfun() -> Any:
            if fails and where == "forward":
                raise PlantedError("in forward")
            loss = self._model(x, "second" if self._rank in unused else "")
            if self._rank in overflowing:
                loss += F.sum(self._model.first.w) * np.inf
            if fails and where == "backward":
                loss += FailingBackward().apply((self._model.first.w,))[0][0]
            return loss

        def update() -> None:
            if self._rank not in without_loss:
                self._optimizer.update(lossfun)
                return
            loss = lossfun()
            self._model.cleargrads()
            loss.backward(loss_scale=self._optimizer._loss_scale)
            self._optimizer.update()

        return self._outcome(update, where if fails else "")

    def flush(self, failing: tuple[int, ...] = (), where: str = "") -> Outcome:
        return self._outcome(
            self._optimizer.flush, where if self._rank in failing else ""
        )

    def synchronize(self) -> Outcome:
        return self._outcome(self._optimizer.synchronize)

    def replace(self, ranks: tuple[int, ...], name: str, seed: int) -> Outcome:
        """Let these ranks have another link of this name, or one that they had not."""
        if self._rank in ranks:
            if hasattr(self._model, name):
                delattr(self._model, name)
            self._model.add_link(name, Part(seed, self._rank))
            for param in self._model[name].params():
                param.update_rule = self._optimizer.create_update_rule()
        return self._outcome()

    def setup(self, ranks: tuple[int, ...], seed: int) -> Outcome:
        """Let these ranks train another model, with the same names."""
        if self._rank in ranks:
            names = sorted(part.name for part in self._model.children())
            self._set_up(
                self._optimizer,
                Tiny(
                    {
                        name: (seed, self._rank, place)
                        for place, name in enumerate(names)
                    }
                ),
            )
        return self._outcome()

    def set_loss_scale(self, ranks: tuple[int, ...], scale: float) -> Outcome:
        if self._rank in ranks:
            self._scale = scale
            self._optimizer.set_loss_scale(scale)
        return self._outcome()

    def go_on_with_a_copy(self) -> Outcome:
        old = self._optimizer
        self._optimizer = copy.deepcopy(old)
        return self._outcome(old.finalize)

    def save_and_load(self, ranks: tuple[int, ...], assume: bool) -> Outcome:
        """Go on with a new model and optimizer, into which these ranks load."""
        old = self._optimizer
        if not isinstance(self._scale, str):
            self._scale = old._loss_scale
        names = sorted(part.name for part in self._model.children())
        self._optimizer = self._made({name: (99, self._rank) for name in names})

        def go_on() -> None:
            try:
                if self._rank in ranks:
                    for one, other in (old.target, self._model), (old, self._optimizer):
                        load_state(other, state_of(one))
                if assume:
                    self._optimizer.assume_synchronized()
            finally:
                old.finalize()

        return self._outcome(go_on)

    def disturb(self, rank: int, what: str) -> Outcome:
        """Change a little on one rank, as a fault of its memory would."""
        if rank == self._rank:
            optimizer, param = self._optimizer.actual_optimizer, self._model.second.w
            if what == "t":
                optimizer.t += 1
            elif what == "rule's t":  # one that has made updates has momenta, too
                param.update_rule.t += param.update_rule.t > 0
            elif what == "epoch":
                optimizer.epoch += 1
            elif what == "loss scale":
                optimizer._loss_scale *= 2
            elif what == "persistent":
                self._model.seen += 1
            elif what == "momentum":
                for array in (param.update_rule.state or {}).values():
                    _flip_a_bit(array)
            else:
                _flip_a_bit(
                    self._model.second.s.array if what == "0-d" else param.array
                )
        return self._outcome()

    def _made(self, seeds: dict[str, tuple[int, ...]]) -> Any:
        config = self._config
        optimizer = create_multi_node_optimizer(
            OPTIMIZERS[config.optimizer](),
            self._comm,
            accumulate_steps=config.steps,
            on_drift=config.on_drift,
            **KINDS[config.kind].arguments,
        )
        if isinstance(self._scale, str):
            optimizer.loss_scaling(interval=2)
        elif self._scale is not None:
            optimizer.set_loss_scale(self._scale)
        self._set_up(optimizer, Tiny(seeds))
        return optimizer

    def _set_up(self, optimizer: Any, model: chainer.Chain) -> None:
        optimizer.setup(model)
        if self._config.hooks:
            optimizer.add_hook(WeightDecay(1e-3))
            optimizer.add_hook(GradientClipping(0.5))

    def _outcome(
        self, call: Callable[[], Any] = lambda: None, where: str = ""
    ) -> Outcome:
        error, text = "", ""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with self._fault(where):
                try:
                    call()
                except PlantedError as planted:
                    error, text = "planted", str(planted)
                except Exception as raised:
                    kinds = [name for kind, name in ERRORS if isinstance(raised, kind)]
                    error, text = [*kinds, type(raised).__name__][0], str(raised)
        texts = [f"{each.category.__name__}: {each.message}" for each in caught]
        known = (*OF_OVERFLOWS, OF_LEFTOVERS)
        warned = [each for each in texts if not any(one in each for one in known)]
        optimizer = self._optimizer
        # Chainer's least is int.
        scale = optimizer._loss_scale and float(optimizer._loss_scale)
        state = {**states(optimizer), "loss scale": repr(scale).encode()}
        return Outcome(
            error,
            text,
            "\n".join(warned),
            optimizer.t,
            state,
            self._model.seen.tobytes(),
        )

    @contextmanager
    def _fault(self, where: str) -> Iterator[None]:
        """Let the next step fail: in a "pre" or "post" hook, or in an update "rule"."""
        if where not in ("pre", "rule", "post"):
            yield
            return
        left = [where]

        def fail(*_: Any) -> None:
            if left:
                raise PlantedError(f"in {left.pop()}")

        rule = self._model.second.s.update_rule
        hooked, timing = (rule, "pre") if where == "rule" else (self._optimizer, where)
        hooked.add_hook(fail, name="planted", timing=timing)
        try:
            yield
        finally:
            hooked.remove_hook("planted")


def _flip_a_bit(array: np.ndarray) -> None:
    array.reshape(-1).view(np.uint8)[0] ^= 1

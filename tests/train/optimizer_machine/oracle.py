"""What commands to trainees should do, in one process: plain arithmetic and Chainer's own steps."""

from __future__ import annotations

import re
import warnings
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.training.trainers import float32_parameters, parameters, state_of
from tests.train.optimizer_machine.trainee import (
    ALL,
    IN_LOSS,
    IN_STEP,
    MISMATCH,
    NOBODY,
    NOWHERE,
    PEER,
    PLANTED,
    SHAPE,
    Config,
    batch,
)

FINE = ""
MOST_NAMED = 8  # differences in a text
NONE: frozenset[int] = frozenset()
# Of states that follow from arithmetic; all others are equal to the last bit.
TOLERANCE = 2e-5
NARROW_TOLERANCE = 1e-2
LOSS_SCALE = "loss scale"
# What is disturbed, and what an error says then.
DRIFTS = {
    "parameter": "second/w",
    "0-d": "second/s",
    "momentum": "second/w",
    "rule's t": "second/w",
    "t": "on t: ",
    "loss scale": LOSS_SCALE,
}


class Mismatch(Exception):
    """All ranks should raise RankMismatchError, with a text that matches this one."""


@dataclass
class Term:
    """The gradients of one update of a rank, by parameters' names, where there is one."""

    rank: int
    grads: dict[str, np.ndarray]


@dataclass
class Mean:
    """Mean gradients, and the loss scale of their exchange."""

    grads: dict[str, np.ndarray]
    scale: float | None

    @property
    def overflows(self):
        return not all(np.isfinite(each).all() for each in self.grads.values())


@dataclass
class Update:
    """What ranks do in an update."""

    number: int  # of the batches
    fails: dict[int, str]  # ranks, and where
    unused: frozenset[int] = NONE
    without_loss: frozenset[int] = NONE
    overflowing: frozenset[int] = NONE
    idle: frozenset[int] = NONE  # that have left a block of `join`


@dataclass
class Pending:
    """Gradients that no step has used."""

    calls: int = 0  # updates since the last step
    terms: list[Term] = field(default_factory=list)  # of these, of all ranks
    flight: list[Mean] = field(default_factory=list)  # one, or none


@dataclass
class Expected:
    """What a command should do, beside the states that ranks have then."""

    errors: dict[int, str] = field(default_factory=dict)  # of ranks that raise
    text: str = ""  # a pattern of all errors' texts
    is_warned: bool = False  # on the first rank; no other rank ever is
    are_states_known: bool = True
    tolerance: float = 0.0  # of states


class Oracle:
    """What is true of one optimizer that some ranks of the world train together.

    Each command makes of the optimizers that ranks had those that they should have, and
    takes those that they do have in their place.

    Attributes:
        new: ranks that have loaded or replaced parameters since all shared a state.
        apart: ranks whose last step failed.
        drifted: what an error says as a rank's memory has changed; "" if none has.
    """

    def __init__(self, config: Config, ranks, outcomes):
        """Begin with what all ranks of the world have."""
        self._config = config
        self._first = ranks[0]
        self._everybody = frozenset(ranks)
        self._saved: dict[int, tuple[Any, Pending]] = {}  # optimizers with theirs
        self._expected = Expected()
        self._renew()
        self._take(outcomes)

    @property
    def is_quiet(self):
        """Whether ranks have the same state, with values of all parameters."""
        return self._have_values and not self._may_differ

    @property
    def is_local(self):
        """Whether the next update does not communicate."""
        return 0 < self._pending.calls < self._config.steps - 1

    @property
    def _have_values(self):
        return not any(map(_lacks_values, self._optimizers.values()))

    @property
    def _may_differ(self):
        return bool(self.new or self.apart or self.drifted)

    def judge(self, name, kwds, outcomes):
        """Take what a command did; return what is wrong with it, in words."""
        self._expected = Expected()
        command = getattr(self, f"_{name}", None)
        try:
            if command is not None:
                command(**kwds)
        except Mismatch as mismatch:
            self._expected.errors = dict.fromkeys(self._everybody, MISMATCH)
            self._expected.text = str(mismatch)
        states = self._states()
        self._take(outcomes)
        found = self._states()
        equal = dict.fromkeys(found, found[self._first])
        if name == "disturb" and not _differences(equal, found):  # it had no such state
            self.drifted = ""
        wrong = [*self._wrong_outcomes()]
        if self._expected.are_states_known:
            wrong += _differences(states, found, self._expected.tolerance)
            if not self._may_differ:
                wrong += _differences(equal, found)
        if name == "synchronize":
            seen = {it.target.seen.tobytes() for it in self._optimizers.values()}
            wrong += ["persistent values differ"] * (len(seen) > 1)
        if not wrong:
            return ""
        errors = [f"{it.error}: {it.text}" for it in self._outcomes.values()]
        return "\n".join([f"not {self._expected}", *wrong[:MOST_NAMED], *errors])

    def _take(self, outcomes):
        self._outcomes = {rank: outcomes[rank] for rank in sorted(self._everybody)}
        self._optimizers = {rank: it.optimizer for rank, it in self._outcomes.items()}

    def _states(self):
        return {rank: _state(it) for rank, it in self._optimizers.items()}

    def _wrong_outcomes(self):
        expected = self._expected
        for rank, each in self._outcomes.items():
            if each.error not in expected.errors.get(rank, FINE).split(" or "):
                yield f"rank {rank} raised {each.error!r}"
            elif not re.search(expected.text, each.text):
                yield f"rank {rank} does not say so"
            if bool(each.warned) != (expected.is_warned and rank == self._first):
                yield f"rank {rank} warned {each.warned!r}"

    # Commands: what they should do. Those that aren't here do nothing.

    def _update(self, number, fails=NOWHERE, **named):
        ranks = {key: self._among(given) for key, given in named.items()}
        self._expected.errors = self._errors_of(Update(number, fails, **ranks))

    def _join(self, number, counts, fails=NOWHERE, at=0):
        own = {rank: counts[rank % len(counts)] for rank in self._everybody}
        errors = {}
        for index in range(max(counts) + self._config.steps):
            idle = frozenset(rank for rank in own if own[rank] <= index)
            if idle == self._everybody and self._pending.calls == 0:
                break
            failing = NOWHERE
            if index == at:
                failing = fails
            update = Update(number + index, failing, idle=idle)
            for rank, error in self._errors_of(update).items():
                if rank not in idle:
                    errors.setdefault(rank, error)
        self._expected.errors = errors

    def _flush(self, fails=NOWHERE):
        if self._meet_before_loss() or self._meet(self._pending.terms):
            self._share()
            return
        means = self._pending.flight + self._means()
        self._pending = Pending()
        self._expected.errors = self._stepped(means, Update(0, fails))

    def _synchronize(self):
        self._share()

    def _replace(self, number, name, ranks):
        self._expected.are_states_known = False
        self.new |= self._among(ranks)

    def _setup(self, seed, ranks):
        self._replace(seed, "", ranks)
        self.apart -= self._among(ranks)
        if self._among(ranks) == self._everybody:
            self._pending = Pending()

    def _set_loss_scale(self, scale, ranks=ALL):
        self._expected.are_states_known = False
        is_alike = self._among(ranks) in (NONE, self._everybody)
        if is_alike:
            self.drifted = ""
        else:
            self.drifted = LOSS_SCALE

    def _disturb(self, what, ranks):
        self._expected.are_states_known = False
        if self._among(ranks):
            self.drifted = DRIFTS.get(what, "")

    def _save(self, ranks=ALL):
        for rank in self._among(ranks):
            own = self._optimizers[rank], self._pending
            self._saved[rank] = deepcopy(own)

    def _renew(self):
        self._expected.are_states_known = False
        self._pending = Pending()
        self.new = self._everybody
        self.apart = NONE
        self.drifted = ""

    def _load(self, ranks=ALL, assume=False, broken=NOBODY):
        """Gradients that were saved count if ranks assume that all have the same state."""
        loading = self._among(ranks)
        for rank in loading:
            own, self._pending = deepcopy(self._saved[rank])
            self._optimizers[rank] = own
        for rank in loading.intersection(broken):
            self._expected.errors[rank] = "KeyError"
            self._expected.are_states_known = False
        if self._config.is_sharded and loading != self._everybody:
            self._expected.are_states_known = False  # the others have parts of theirs
        self.new |= loading
        self.apart -= loading
        if assume:
            self.new = NONE

    def _among(self, ranks):
        """Return those of these ranks that train together."""
        return self._everybody.intersection(ranks)

    def _failing(self, update, places):
        training = self._everybody - update.idle
        return frozenset(it for it in training if update.fails.get(it) in places)

    # An update, step by step.

    def _errors_of(self, update):
        """Do what an update should do; return the errors of ranks that raise."""
        failing = self._failing(update, IN_LOSS)
        if self.is_local:
            self._compute_losses(update)
            self._add(update)
            return dict.fromkeys(failing, PLANTED)
        self._compute_losses(update, self._everybody - update.without_loss)
        early = self.new
        begins_again = self._meet_before_loss(can_count=not update.without_loss)
        if failing:
            waiting = NONE  # for the others, before their own losses
            if early != self._everybody and failing - early:
                waiting = early
            self._compute_losses(update, waiting)
            errors = dict.fromkeys(self._everybody, PEER)
            errors.update(dict.fromkeys(failing - waiting, PLANTED))
            if self._config.kind == "overlap" and not self._failing(
                update, ["forward"]
            ):
                # With a plan they meet before the others' backward, not after it.
                either = f"{PEER} or {PLANTED}"
                errors.update(dict.fromkeys(failing & waiting, either))
            return errors
        self._compute_losses(update)
        is_due = self._pending.calls == self._config.steps - 1
        given = []  # to be exchanged
        if is_due:
            given = self._pending.terms + self._terms(update)
        if begins_again or self._meet(given):
            self._share()
            return {}
        self._add(update)
        if is_due:
            return self._finish(update)
        return {}

    def _meet_before_loss(self, can_count=True):
        """Let ranks settle what they can then; return whether they share a state after it."""
        if self.new != self._everybody:
            return bool(self.new)
        return self._settle(can_count and self._have_values)

    def _meet(self, terms):
        """Let ranks settle what is left, with gradients; return whether they share a state."""
        names: dict[int, set[str]] = {}  # of gradients that a rank has
        for term in terms:
            names.setdefault(term.rank, set()).update(term.grads)
        are_compared = not (self.new or self.apart or self._config.zero_fill)
        if are_compared and len(set(map(frozenset, names.values()))) > 1:
            raise Mismatch
        return self._settle(can_count=False)

    def _settle(self, can_count):
        """Return whether ranks share a state after their losses; perhaps they do so now."""
        if not (self.new or self.apart):
            on_drift = self._config.on_drift
            if self.drifted and (on_drift == "raise" or self.drifted == LOSS_SCALE):
                raise Mismatch(self.drifted)
            if not self.drifted or on_drift == "ignore":
                return False
            self._expected.is_warned = True
        if can_count:
            self._share()
        return not can_count

    def _share(self):
        """Let all have the first rank's state; what it has no value for is the next one's."""
        self._pending = Pending()
        self.new = self._everybody
        models = [it.target for it in self._optimizers.values()]
        params = [dict(model.namedparams()) for model in models]
        if others := set.union(*map(set, params)) - set.intersection(*map(set, params)):
            raise Mismatch("|".join(others))
        for name, param in params[0].items():
            for other in params[1:]:
                if not param.is_initialized and other[name].is_initialized:
                    param.array = other[name].array
        first = self._optimizers[self._first]
        self._optimizers = {rank: deepcopy(first) for rank in self._optimizers}
        self.new = NONE
        self.apart = NONE
        self.drifted = ""

    def _compute_losses(self, update, without=NONE):
        """Give parameters the values that losses give them, of all ranks but these."""
        without |= update.unused | update.idle | self._failing(update, ["forward"])
        for rank in self._everybody - without:
            for part in self._optimizers[rank].target.children():
                if not part.w.is_initialized:
                    part.w.initialize(SHAPE)
                    self.new |= {rank}

    def _terms(self, update):
        lacking = update.idle | self._failing(update, IN_LOSS)
        return [
            Term(rank, _gradients(self._optimizers[rank], update, rank))
            for rank in self._everybody - lacking
        ]

    def _add(self, update):
        self._pending.terms += self._terms(update)
        self._pending.calls += 1

    def _means(self):
        """Return the mean of what is added up, if there is something."""
        terms = self._pending.terms
        grads: dict[str, Any] = {}
        for term in terms:
            for name, grad in term.grads.items():
                grads[name] = grads.get(name, 0) + grad / len(terms)
        mean = Mean(grads, self._optimizers[self._first]._loss_scale)
        if terms:
            return [mean]
        return []

    def _finish(self, update):
        """Exchange what is added up, and step; return the errors of ranks that raise."""
        means = self._means()
        flight = self._pending.flight
        self._pending = Pending(flight=flight)
        if self._config.delay and means:
            self._pending.flight = means
            means = flight
        return self._stepped(means, update)

    def _stepped(self, means, update):
        """Step along each, which calls no update rule where it overflows; return errors."""
        if not means:
            return {}
        failing = self._failing(update, IN_STEP)
        if all(each.overflows for each in means):
            failing -= self._failing(update, ["rule"])
        if failing and self._config.is_sharded:
            # Hooks fail before any rank calls a rule.
            if in_hooks := self._failing(update, ["pre", "post"]):
                failing = in_hooks
            else:
                self._expected.are_states_known = False
                self.apart = self._everybody
            errors = dict.fromkeys(self._everybody, PEER)
            return {**errors, **dict.fromkeys(failing, PLANTED)}
        if failing or self.drifted:
            self._expected.are_states_known = False
            self.apart |= failing
            return dict.fromkeys(failing, PLANTED)
        optimizer = self._optimizers[self._first]
        for mean in means:
            _step(optimizer, mean)
        self._optimizers = dict.fromkeys(self._optimizers, optimizer)
        self._expected.tolerance = TOLERANCE
        if self._config.is_narrow:
            self._expected.tolerance = NARROW_TOLERANCE
        return {}


def _lacks_values(optimizer):
    return not all(each.is_initialized for each in optimizer.target.params())


def _gradients(optimizer, update, rank):
    """Return the gradients of an update's loss, in double precision."""
    x = batch(update.number, rank)
    grads = {}
    for part in optimizer.target.children():
        if part.name == "second" and rank in update.unused:
            continue
        for name, param in part.namedparams(include_uninit=False):
            if name == "/w":
                target = x.reshape(SHAPE)
            else:
                target = x[0]
            grads[f"/{part.name}{name}"] = np.float64(param.array) - target
    if rank in update.overflowing:
        grads["/first/w"] = grads["/first/w"] + np.inf
    return grads


def _step(optimizer, mean):
    """Let Chainer's optimizer step along these gradients."""
    for name, param in optimizer.target.namedparams():
        param.cleargrad()
        param._loss_scale = None
        if name in mean.grads:
            grad = mean.grads[name] * (mean.scale or 1)
            param.grad = np.asarray(grad, param.dtype)
            param._loss_scale = mean.scale
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of gradients that aren't finite
        optimizer.update()


def _state(optimizer):
    """Return what ranks have alike."""
    found = parameters(optimizer.target)
    found["loss scale"] = np.array(optimizer._loss_scale, float)
    for name, array in float32_parameters(optimizer.target).items():
        found[f"{name} in float32"] = array
    for name, value in state_of(optimizer).items():
        if value.dtype != object:  # None
            found[f"state of {name}"] = value
    return found


def _differences(expected, found, tolerance=0.0):
    """Return in words how ranks' states differ."""
    return [
        f"{key} of rank {rank} is {found[rank].get(key)}, not {value}"
        for rank, state in expected.items()
        for key, value in state.items()
        if not _are_alike(value, found[rank].get(key), tolerance)
    ]


def _are_alike(one, other, tolerance):
    """Return whether both are arrays that differ by so little; by no bit without tolerance."""
    if not isinstance(other, np.ndarray) or one.dtype != other.dtype:
        return False
    if tolerance == 0:
        return one.tobytes() == other.tobytes()
    return np.allclose(one, other, tolerance, tolerance, equal_nan=True)

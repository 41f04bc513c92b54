"""What commands to trainees should do, in one process: plain arithmetic and Chainer's own steps."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.training.trainers import float32_parameters, parameters, state_of
from tests.train.optimizer_machine.trainee import (
    IN_LOSS,
    IN_STEP,
    MISMATCH,
    NOBODY,
    PEER,
    PLANTED,
    Config,
    batch,
)

FINE = ""
MOST_NAMED = 8  # differences in a text
NONE: frozenset[int] = frozenset()
# Of states that follow from arithmetic; all others are equal to the last bit.
TOLERANCE = 2e-5
NARROW_TOLERANCE = 1e-2
LOSS_SCALE = ("loss scale",)
# What is disturbed, and what an error mentions then.
DRIFTS = {
    "parameter": ("second/w",),
    "0-d": ("second/s",),
    "momentum": ("second/w", "momentum"),
    "rule's t": ("second/w", "`t`", " t "),
    "t": ("`t`", " t ", " t:"),
    "loss scale": LOSS_SCALE,
}


class Mismatch(Exception):
    """All ranks should raise RankMismatchError, with one of these texts in it."""


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

    batches: list[np.ndarray]  # one a rank
    places: dict[int, str]  # where ranks fail
    unused: frozenset[int] = NONE
    without_loss: frozenset[int] = NONE
    overflowing: frozenset[int] = NONE
    idle: frozenset[int] = NONE  # that have left a block of `join`

    def failing(self, places):
        return frozenset(rank for rank, it in self.places.items() if it in places)


@dataclass
class Pending:
    """Gradients that no step has used."""

    calls: int = 0  # updates since the last step
    terms: list[Term] = field(default_factory=list)  # of these, of all ranks
    flight: Mean | None = None


@dataclass
class Saved:
    """What a rank has saved."""

    optimizer: Any
    pending: Pending


@dataclass
class Expected:
    """What a command should do, beside the states that ranks have then."""

    errors: list[str]  # of each rank
    mentions: tuple[str, ...] = ()  # one of them is in each error's text
    is_warned: bool = False  # on rank 0; no other rank ever is
    are_states_known: bool = True
    tolerance: float = 0.0  # of states


class Oracle:
    """What is true of one optimizer that some ranks of the world train together.

    Each command makes of the optimizers that ranks had those that they should have, and
    takes those that they do have in their place.

    Attributes:
        new: ranks that have loaded or replaced parameters since all shared a state.
        apart: ranks whose last step failed.
        drifted: what an error mentions as a rank's memory has changed.
    """

    def __init__(self, config: Config, members, outcomes):
        """Begin with what all ranks of the world have."""
        self._config = config
        self._members = members
        self._size = len(members)
        self._everybody = frozenset(range(self._size))
        self._saved: dict[int, Saved] = {}
        self._expected = Expected([])
        self._renew()
        self._take(outcomes)

    @property
    def is_quiet(self):
        """Whether ranks have the same state, with values of all parameters."""
        has_values = not any(map(_lacks_values, self._optimizers))
        return has_values and not (self.new or self.apart or self.drifted)

    @property
    def is_local(self):
        """Whether the next update does not communicate."""
        return 0 < self._pending.calls < self._config.steps - 1

    def judge(self, name, kwds, outcomes):
        """Take what a command did; return what is wrong with it, in words."""
        self._expected = Expected([FINE] * self._size)
        command = getattr(self, f"_{name}", None)
        try:
            if command is not None:
                command(**kwds)
        except Mismatch as mismatch:
            self._expected.errors = [MISMATCH] * self._size
            self._expected.mentions = mismatch.args
        states = [_state(each) for each in self._optimizers]
        self._take(outcomes)
        found = [_state(each) for each in self._optimizers]
        are_equal = not self._difference(found[:1] * self._size, found)
        if name == "disturb" and are_equal:  # there was no such state
            self.drifted = ()
        wrong = [*self._wrong_outcomes()]
        if self._expected.are_states_known:
            wrong += self._difference(states, found, self._expected.tolerance)
            if not (self.new or self.apart or self.drifted or are_equal):
                wrong += self._difference(found[:1] * self._size, found)
        if name == "synchronize":
            seen = {each.target.seen.tobytes() for each in self._optimizers}
            wrong += ["persistent values differ"] * (len(seen) > 1)
        if not wrong:
            return ""
        errors = [f"{each.error}: {each.text}" for each in self._outcomes]
        return "\n".join([f"not {self._expected}", *wrong[:MOST_NAMED], *errors])

    def _take(self, outcomes):
        self._outcomes = [outcomes[rank] for rank in self._members]
        self._optimizers = [each.optimizer for each in self._outcomes]

    def _wrong_outcomes(self):
        expected = self._expected
        for rank, each in enumerate(self._outcomes):
            who = f"rank {self._members[rank]}"
            if each.error != expected.errors[rank]:
                yield f"{who} raised {each.error!r}"
            elif expected.mentions and not any(
                text in each.text for text in expected.mentions
            ):
                yield f"{who} does not mention it"
            if bool(each.warned) != (expected.is_warned and rank == 0):
                yield f"{who} warned {each.warned!r}"

    def _difference(self, expected, found, tolerance=0.0):
        return [
            f"{key} of rank {self._members[rank]} is {found[rank].get(key)}, not {value}"
            for rank, state in enumerate(expected)
            for key, value in state.items()
            if not _are_alike(value, found[rank].get(key), tolerance)
        ]

    # Commands: what they should do. Those that aren't here do nothing.

    def _update(self, number, failing=NOBODY, where=IN_LOSS[:1], **named):
        ranks = {key: self._among(given) for key, given in named.items()}
        places = self._places(failing, where)
        update = Update(self._batches(number), places, **ranks)
        self._expected.errors = self._errors_of(update)

    def _join(self, number, counts, failing=NOBODY, at=0):
        own = [counts[rank % len(counts)] for rank in self._members]
        errors = self._expected.errors
        for index in range(max(own) + self._config.steps):
            idle = frozenset(rank for rank, count in enumerate(own) if count <= index)
            if idle == self._everybody and self._pending.calls == 0:
                break
            places = {}
            if index == at:
                places = self._places(failing, IN_LOSS[:1])
            places = {rank: places[rank] for rank in places.keys() - idle}
            update = Update(self._batches(number + index), places, idle=idle)
            for rank, error in enumerate(self._errors_of(update)):
                if rank not in idle:
                    errors[rank] = errors[rank] or error

    def _flush(self, failing=NOBODY, where=IN_STEP[:1]):
        begins_again = self._meet_before_loss(self.new, can_count=True)
        if not begins_again:
            begins_again = self._meet(self._pending.terms)
        if begins_again:
            self._share()
            return
        means = [self._pending.flight] if self._pending.flight else []
        if self._pending.terms:
            means.append(self._mean())
        self._pending = Pending()
        if means:
            update = Update([], self._places(failing, where))
            self._expected.errors = self._stepped(means, update)

    def _synchronize(self):
        self._share()

    def _replace(self, ranks, name, seed):
        self._expected.are_states_known = False
        self.new |= self._among(ranks)

    def _setup(self, ranks, seed):
        self._replace(ranks, "", seed)
        self.apart -= self._among(ranks)
        if self._among(ranks) == self._everybody:
            self._pending = Pending()

    def _set_loss_scale(self, ranks, scale):
        self._expected.are_states_known = False
        is_alike = self._among(ranks) in (NONE, self._everybody)
        self.drifted = () if is_alike else LOSS_SCALE

    def _disturb(self, ranks, what):
        self._expected.are_states_known = False
        if self._among(ranks):
            self.drifted = DRIFTS.get(what, ())

    def _save(self, ranks):
        for rank in self._among(ranks):
            own = copy.deepcopy(self._pending)
            self._saved[rank] = Saved(self._optimizers[rank], own)

    def _renew(self):
        self._expected.are_states_known = False
        self._pending = Pending()
        self.new = self._everybody
        self.apart = NONE
        self.drifted: tuple[str, ...] = ()

    def _load(self, ranks, assume=False, broken=NOBODY):
        """Gradients that were saved count if ranks assume that all have the same state."""
        loading = self._among(ranks)
        for rank in loading:
            if rank in self._among(broken):
                self._expected.errors[rank] = "KeyError"
                self._expected.are_states_known = False
            self._optimizers[rank] = copy.deepcopy(self._saved[rank].optimizer)
            self._pending = copy.deepcopy(self._saved[rank].pending)
        self.new |= loading
        self.apart -= loading
        if assume:
            self.new = NONE

    def _among(self, ranks):
        """Return which of these ranks are named, by their numbers here."""
        return frozenset(
            rank for rank, member in enumerate(self._members) if member in ranks
        )

    def _places(self, failing, where):
        return {
            rank: where[self._members[rank] % len(where)]
            for rank in self._among(failing)
        }

    def _batches(self, number):
        return [batch(number, rank) for rank in self._members]

    # An update, step by step.

    def _errors_of(self, update):
        """Do what an update should do; return the error of each rank."""
        failing = update.failing(IN_LOSS)
        if self.is_local:
            self._compute_losses(update)
            self._add(update)
            return self._errors(failing, FINE)
        self._compute_losses(update, self._everybody - update.without_loss)
        early = self.new
        begins_again = self._meet_before_loss(early, not update.without_loss)
        if failing:
            waiting = NONE  # for the others, before their own losses
            if early != self._everybody and failing - early:
                waiting = early
            self._compute_losses(update, waiting)
            return self._errors(failing - waiting, PEER)
        self._compute_losses(update)
        added = [*self._pending.terms, *self._terms(update)]
        if not begins_again:
            is_due = self._pending.calls == self._config.steps - 1
            begins_again = self._meet(added if is_due else [])
        if begins_again:
            self._share()
            return self._errors(NONE, FINE)
        self._add(update)
        if is_due:
            return self._finish(update)
        return self._errors(NONE, FINE)

    def _errors(self, failing, others):
        return [PLANTED if rank in failing else others for rank in range(self._size)]

    def _meet_before_loss(self, early, can_count):
        """Let ranks settle what they can then; return whether they share a state after it."""
        if early != self._everybody:
            return bool(early)
        has_values = not any(map(_lacks_values, self._optimizers))
        return self._settle(can_count and has_values)

    def _meet(self, terms):
        """Let ranks settle what is left, with gradients; return whether they share a state."""
        names: dict[int, set[str]] = {}  # of gradients that a rank has
        for term in terms:
            names.setdefault(term.rank, set()).update(term.grads)
        may_differ = self.new or self.apart or self._config.zero_fill
        if not may_differ and len({frozenset(own) for own in names.values()}) > 1:
            raise Mismatch
        return self._settle(can_count=False)

    def _settle(self, can_count):
        """Return whether ranks share a state after their losses; perhaps they do so now."""
        if not (self.new or self.apart):
            on_drift = self._config.on_drift
            if self.drifted and (on_drift == "raise" or self.drifted == LOSS_SCALE):
                raise Mismatch(*self.drifted)
            if not self.drifted or on_drift == "ignore":
                return False
            self._expected.is_warned = True
        if can_count:
            self._share()
        return not can_count

    def _share(self):
        """Let all have rank 0's state; what it has no value for is the first one's that has."""
        self._pending = Pending()
        self.new = self._everybody
        names = [set(dict(it.target.namedparams())) for it in self._optimizers]
        if others := set.union(*names) - set.intersection(*names):
            raise Mismatch(*others)
        first = self._optimizers[0]
        for other in self._optimizers[1:]:
            given = dict(other.target.namedparams())
            for name, param in first.target.namedparams():
                if not param.is_initialized and given[name].is_initialized:
                    param.array = given[name].array
        self._optimizers = [copy.deepcopy(first) for _ in self._optimizers]
        self.new = NONE
        self.apart = NONE
        self.drifted = ()

    def _compute_losses(self, update, without=NONE):
        """Give parameters the values that losses give them, of all ranks but these."""
        for rank in self._everybody - without - update.unused - update.idle:
            if update.places.get(rank) == "forward":
                continue
            for part in self._optimizers[rank].target.children():
                if not part.w.is_initialized:
                    part.w.initialize(2)
                    self.new |= {rank}

    def _terms(self, update):
        lacking = update.idle | update.failing(IN_LOSS)
        return [
            Term(rank, _gradients(self._optimizers[rank], update, rank))
            for rank in self._everybody - lacking
        ]

    def _add(self, update):
        self._pending.terms += self._terms(update)
        self._pending.calls += 1

    def _mean(self):
        terms = self._pending.terms
        grads: dict[str, Any] = {}
        for term in terms:
            for name, grad in term.grads.items():
                grads[name] = grads.get(name, 0) + grad / len(terms)
        return Mean(grads, self._optimizers[0]._loss_scale)

    def _finish(self, update):
        """Exchange what is added up, and step; return the error of each rank."""
        used = self._mean() if self._pending.terms else None
        flight = self._pending.flight
        self._pending = Pending(flight=flight)
        if self._config.delay and used is not None:
            self._pending.flight = used
            used = flight
        if used is None:
            return self._errors(NONE, FINE)
        return self._stepped([used], update)

    def _stepped(self, means, update):
        """Step along each, which calls no update rule where it overflows; return errors."""
        failing = update.failing(IN_STEP)
        if all(each.overflows for each in means):
            failing -= update.failing(["rule"])
        if failing or self.drifted:
            self._expected.are_states_known = False
            self.apart |= failing
            return self._errors(failing, FINE)
        optimizer = self._optimizers[0]
        for mean in means:
            _step(optimizer, mean)
        self._optimizers = [optimizer] * self._size
        self._expected.tolerance = TOLERANCE
        if self._config.is_narrow:
            self._expected.tolerance = NARROW_TOLERANCE
        return self._errors(NONE, FINE)


def _lacks_values(optimizer):
    return not all(each.is_initialized for each in optimizer.target.params())


def _gradients(optimizer, update, rank):
    """Return the gradients of an update's loss, in double precision."""
    x = update.batches[rank]
    grads = {}
    for part in optimizer.target.children():
        if part.name == "second" and rank in update.unused:
            continue
        for name, param in part.namedparams(include_uninit=False):
            target = x if name == "/w" else x[0]
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


def _are_alike(one, other, tolerance):
    """Return whether both are arrays that differ by so little; by no bit without tolerance."""
    if not isinstance(other, np.ndarray) or one.dtype != other.dtype:
        return False
    if tolerance == 0:
        return one.tobytes() == other.tobytes()
    return np.allclose(one, other, tolerance, tolerance, equal_nan=True)

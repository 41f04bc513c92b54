"""Sequences of commands that are drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from tests.train.optimizer_machine.oracle import DRIFTS
from tests.train.optimizer_machine.trainee import (
    ALL,
    DISTURB,
    IN_LOSS,
    IN_STEP,
    NOBODY,
    NOWHERE,
    OPTIMIZERS,
    Config,
)

MOVES = 12  # at most, in a sequence
MOST_PARTS = 4
SCALES = [0.5, 8.0, 64.0, 1024.0]
SETTINGS = {
    "steps": [1, 2, 3],
    "scaling": [None, 8.0, "dynamic"],
    "hooks": [True, False],
    "optimizer": list(OPTIMIZERS),
    "on_drift": ["raise", "raise", "synchronize", "ignore"],
    "zero_fill": [True, True, True, False],
    "dtype": ["float32"] * 5 + ["float16"],
    "float32_masters": [True, False],
    "wire_dtype": [None] * 5 + ["float16", "float32"],
    "is_lazy": [True] + [False] * 4,
    "optimizers": [1, 1, 1, 2],
    "groups": [1, 1, 1, 2],
}


def lead(play, kind, seed, count):
    """Draw and play so many sequences (rank 0)."""
    for number in range(count):
        draw = random.Random(f"{kind} {seed} {number}")
        play.begin(draw_config(draw, kind))
        drawn = Drawn(play, draw)
        for _ in range(draw.randint(1, MOVES)):
            drawn.move()
        play.end()


def draw_config(draw, kind):
    drawn = {name: draw.choice(values) for name, values in SETTINGS.items()}
    config = Config(kind, **drawn)
    static = {"scaling": draw.choice([None, 8.0])}
    if config.is_narrow:  # Adam needs more digits, a dynamic scale larger numbers
        config = replace(config, optimizer="MomentumSGD", **static)
    if config.is_lazy:
        # Chainer's hooks and its check for overflows need values, and pickles of
        # float32 values do.
        config = replace(config, hooks=False, float32_masters=False, **static)
    return config


class Drawn:
    """One sequence; each move gives one command or several, if it can be made now."""

    def __init__(self, play, draw):
        self._play = play
        self._draw = draw
        self._config = play.config
        self._parts = [2] * play.config.optimizers
        self._which = 0
        self._unused = NOBODY
        self._moves = [
            *[self._train] * 3,
            self._overflow,
            self._fail_in_loss,
            self._fail_in_step,
            partial(self._do, "flush"),
            self._join,
            self._replace,
            self._add,
            self._set_up,
            self._set_scale,
            self._disturb,
            partial(self._do, "synchronize"),
            partial(self._do, "go_on_with_a_copy"),
            self._save_and_load,
        ]

    def move(self):
        self._which = self._draw.randrange(self._config.optimizers)
        self._draw.choice(self._moves)()

    # What can be asked.

    @property
    def _is_quiet(self):
        return all(each.is_quiet for each in self._play.oracles[self._which])

    @property
    def _is_local(self):
        return any(each.is_local for each in self._play.oracles[self._which])

    def _happens(self, chance=0.5):
        return self._draw.random() < chance

    def _one(self):
        return [self._draw.randrange(self._play.size)]

    def _ranks(self):
        """Return all ranks, or one."""
        return self._draw.choice([ALL, self._one(), self._one()])

    def _do(self, name, **kwds):
        self._play.do(name, self._which, **kwds)

    def _update(self, count=1, **kwds):
        for _ in range(count):
            self._do("update", unused=self._unused, **kwds)

    def _begin_accumulation(self):
        """Perhaps begin one that the next update doesn't end, if it can be."""
        for _ in range(self._draw.randrange(self._config.steps)):
            if not self._is_local:
                self._update()

    # Updates.

    def _train(self):
        """Some ranks don't use the second part, from now on."""
        if self._happens(0.4):
            self._unused = self._ranks()
        else:
            self._unused = NOBODY
        without_loss = NOBODY
        if self._happens(0.3):
            without_loss = self._ranks()
        self._update(self._draw.randint(1, 4), without_loss=without_loss)

    def _overflow(self):
        if self._config.scaling == "dynamic":
            self._update(self._draw.randint(1, 2), overflowing=self._ranks())

    def _fail_in_loss(self):
        self._begin_accumulation()
        self._update(fails=dict.fromkeys(self._ranks(), self._draw.choice(IN_LOSS)))

    def _fail_in_step(self):
        """Fail in the next update that steps, and perhaps overflow there; or in a flush."""
        fails = {rank: self._draw.choice(IN_STEP) for rank in self._ranks()}
        if self._is_quiet and self._happens(0.3):
            self._do("flush", fails=fails)
            return
        overflowing = NOBODY
        if self._config.scaling == "dynamic" and self._happens():
            overflowing = self._ranks()
        for _ in range(2 * self._config.steps):
            if self._is_quiet:
                self._update(fails=fails, overflowing=overflowing)

    def _join(self):
        """Ranks that must agree on missing gradients make one update at least, which succeeds."""
        fewest = 1
        if self._config.zero_fill:
            fewest = 0
        counts = [self._draw.randint(fewest, 3) for _ in range(self._play.size)]
        fails = NOWHERE
        if self._config.zero_fill and self._happens(0.3):
            fails = dict.fromkeys(self._ranks(), "forward")
        self._do("join", counts=counts, fails=fails, at=self._draw.randrange(2))

    # Parameters that change.

    def _replace(self):
        name = self._draw.choice(["first", "second"])
        self._play.replace(self._ranks(), name, self._which)

    def _add(self):
        """On all ranks, of which one may replace another part; or on one first."""
        number = self._parts[self._which]
        if number == MOST_PARTS:
            return
        self._parts[self._which] += 1
        name = f"added{number}"
        if self._happens():
            self._play.replace(self._one(), name, self._which)
            for _ in range(self._draw.randrange(3)):
                self._do(self._draw.choice(["update", "flush"]))
        self._play.replace(ALL, name, self._which)
        if self._happens():
            self._play.replace(self._ranks(), "first", self._which)

    def _set_up(self):
        if not self._is_local:  # else only this rank's next update would be collective
            self._do("setup", ranks=self._ranks(), seed=self._draw.randrange(1000))

    # States that change.

    def _set_scale(self):
        if self._is_quiet and self._config.scaling == 8.0:
            self._begin_accumulation()
            self._do("set_loss_scale", scale=self._draw.choice(SCALES))

    def _disturb(self):
        """Perhaps all are told, until ranks synchronize."""
        what = self._draw.choice([*DISTURB])
        if not self._is_quiet or (what == "loss scale" and not self._config.scaling):
            return
        self._do("disturb", ranks=self._one(), what=what)
        # Else gradients that a rank lacks may be named first.
        if what in DRIFTS and self._config.zero_fill and self._happens():
            self._update(self._config.steps)
        self._do("synchronize")

    def _save_and_load(self):
        """On all ranks, perhaps after other updates or into a new optimizer; or on one alone."""
        is_quiet = self._is_quiet
        self._do("save")
        # A load doesn't take away values that a lazy parameter has got since.
        if not self._config.is_lazy and self._happens():
            self._update(self._draw.randint(1, 3))
        if self._happens():
            self._do("renew")
        if self._happens(0.7):
            self._do("load", assume=is_quiet and self._happens())
            return
        self._do("load", ranks=self._one())
        if self._config.steps > 1:  # ranks may be at different updates of a step
            self._do("synchronize")

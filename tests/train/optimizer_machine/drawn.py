"""Sequences of commands that are drawn from a seed."""

from __future__ import annotations

import random

from tests.train.optimizer_machine.oracle import DRIFTS
from tests.train.optimizer_machine.trainee import (
    ALL,
    DISTURB,
    IN_LOSS,
    IN_STEP,
    NOBODY,
    OPTIMIZERS,
    Config,
)

MOVES = 12  # at most, in a sequence
MOST_PARTS = 4
SCALES = [0.5, 8.0, 64.0, 1024.0]


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
    settings = {
        "scaling": draw.choice([None, 8.0, "dynamic"]),
        "hooks": draw.random() < 0.5,
        "optimizer": draw.choice(list(OPTIMIZERS)),
    }
    if draw.random() < 0.3:  # Adam needs more digits, a dynamic scale larger numbers
        settings["scaling"] = draw.choice([None, 8.0])
        settings["optimizer"] = "MomentumSGD"
        settings["dtype"] = draw.choice(["float16", "float32"])
        settings["wire_dtype"] = draw.choice(["float16", "float32", None])
        is_half = settings["dtype"] == "float16"
        settings["float32_masters"] = is_half and draw.random() < 0.5
    if draw.random() < 0.2:  # Chainer's hooks and its check for overflows need values
        settings["is_lazy"] = True
        settings["float32_masters"] = False  # one without values can't be pickled
        settings["hooks"] = False
        settings["scaling"] = draw.choice([None, 8.0])
    return Config(
        kind=kind,
        steps=draw.choice([1, 2, 3]),
        on_drift=draw.choice(["raise", "raise", "synchronize", "ignore"]),
        zero_fill=draw.random() < 0.8,
        optimizers=draw.choice([1, 1, 1, 2]),
        groups=draw.choice([1, 1, 1, 2]),
        **settings,
    )


class Drawn:
    """One sequence; each move gives one command or several, if it can be made now."""

    def __init__(self, play, draw):
        self._play = play
        self._draw = draw
        self._config = play.config
        self._parts = [2] * play.config.optimizers
        self._which = 0
        self._unused = NOBODY
        self._moves = {
            self._train: 4,
            self._fail_in_loss: 2,
            self._fail_in_step: 2,
            self._save_and_load: 2,
            self._replace: 2,
            self._join: 2,
            self._overflow: 1,
            self._flush: 1,
            self._add: 1,
            self._set_up: 1,
            self._set_scale: 1,
            self._set_scale_on_one: 1,
            self._drift: 1,
            self._disturb: 1,
            self._synchronize: 1,
            self._copy: 1,
        }

    def move(self):
        self._which = self._draw.randrange(self._config.optimizers)
        [move] = self._draw.choices([*self._moves], [*self._moves.values()])
        move()

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

    def _update_within_group(self):
        """Perhaps begin a group that the next update doesn't end, if it can be."""
        for _ in range(self._draw.randrange(self._config.steps)):
            if not self._is_local:
                self._update()

    def _update_until_collective(self):
        for _ in range(self._config.steps):
            if self._is_local:
                self._update()
        self._update()

    # Updates.

    def _train(self):
        """Some ranks don't use the second part, from now on."""
        self._unused = self._ranks() if self._happens(0.4) else NOBODY
        without_loss = self._ranks() if self._happens(0.3) else NOBODY
        self._update(self._draw.randint(1, 4), without_loss=without_loss)

    def _overflow(self):
        if self._config.scaling == "dynamic":
            self._update(self._draw.randint(1, 2), overflowing=self._ranks())

    def _fail_in_loss(self):
        self._update_within_group()
        self._update(failing=self._ranks(), where=[self._draw.choice(IN_LOSS)])

    def _fail_in_step(self):
        """Fail in the next update that steps, and perhaps overflow there; or in a flush."""
        where = self._draw.sample(IN_STEP, self._draw.randint(1, 2))
        failing = self._ranks()
        if self._is_quiet and self._happens(0.3):
            self._do("flush", failing=failing, where=where)
            return
        overflowing = NOBODY
        if self._config.scaling == "dynamic" and self._happens():
            overflowing = self._ranks()
        for _ in range(2 * self._config.steps):
            if self._is_quiet:
                self._update(failing=failing, where=where, overflowing=overflowing)

    def _flush(self):
        self._do("flush")

    def _join(self):
        """Ranks that must agree on missing gradients make one update at least, which succeeds."""
        fewest = 0 if self._config.zero_fill else 1
        counts = [self._draw.randint(fewest, 3) for _ in range(self._play.size)]
        failing = NOBODY
        if self._config.zero_fill and self._happens(0.3):
            failing = self._ranks()
        self._do("join", counts=counts, failing=failing, at=self._draw.randrange(2))

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
                self._draw.choice([self._update, self._flush])()
        self._play.replace(ALL, name, self._which)
        if self._happens():
            self._play.replace(self._ranks(), "first", self._which)

    def _set_up(self):
        if not self._is_local:  # else only this rank's next update would be collective
            self._do("setup", ranks=self._ranks(), seed=self._draw.randrange(1000))

    # States that change.

    def _set_scale(self):
        if self._is_quiet and self._config.scaling == 8.0:
            self._update_within_group()
            self._do("set_loss_scale", ranks=ALL, scale=self._draw.choice(SCALES))

    def _set_scale_on_one(self):
        """All are told until it is on all."""
        # Else gradients that a rank lacks may be named first.
        can_be_told = self._is_quiet and self._config.zero_fill
        if can_be_told and self._config.scaling == 8.0:
            self._do("set_loss_scale", ranks=self._one(), scale=16.0)
            self._update_until_collective()
            self._do("set_loss_scale", ranks=ALL, scale=32.0)

    def _drift(self):
        what = self._draw.choice([*DRIFTS])
        has_it = what != "loss scale" or self._config.scaling == "dynamic"
        # Else gradients that a rank lacks may be named first.
        if has_it and self._is_quiet and self._config.zero_fill:
            self._do("disturb", ranks=self._one(), what=what)
            self._update_until_collective()
            self._synchronize()

    def _disturb(self):
        what = self._draw.choice([*DISTURB])
        if self._is_quiet and (what != "loss scale" or self._config.scaling):
            self._do("disturb", ranks=self._one(), what=what)
            self._synchronize()

    def _synchronize(self):
        self._do("synchronize")

    # Other optimizers with the same state.

    def _copy(self):
        self._do("go_on_with_a_copy")

    def _save_and_load(self):
        """On all ranks, perhaps after other updates or into a new optimizer; or on one alone."""
        is_quiet = self._is_quiet
        self._do("save", ranks=ALL)
        if is_quiet and self._happens():
            self._update(self._draw.randint(1, 3))
        if self._happens():
            self._do("renew")
        if self._happens(0.3):
            self._do("load", ranks=self._one())
            if self._config.steps > 1:  # ranks may be at different updates of a group
                self._synchronize()
            return
        self._do("load", ranks=ALL, assume=is_quiet and self._happens())

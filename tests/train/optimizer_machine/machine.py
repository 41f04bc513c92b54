"""Hypothesis draws what happens to an optimizer of all ranks; each outcome is judged."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chainermn_train.optimizers import overlapped_exchange
from tests.support.training.exchanges import KINDS
from tests.train.optimizer_machine.commands import OPTIMIZERS, Config, OneRank
from tests.train.optimizer_machine.expectations import (
    NONE,
    Prediction,
    Ranks,
    Situation,
    judge,
)
from tests.train.optimizer_machine.lockstep import Lockstep

COMMANDS = 15  # at most, in a sequence
BUCKET_BYTES = 8  # of overlap: each parameter goes by itself
MOST_LINKS = 4
SCALES = [0.5, 8.0, 64.0, 1024.0]
IN_A_STEP = ["pre", "rule", "post"]
# What is disturbed, and what an error must mention.
DRIFTS = {
    "parameter": ("second/w",),
    "0-d": ("second/s",),
    "momentum": ("second/w", "momentum"),
    "rule's t": ("second/w", "`t`", " t "),
    "t": ("`t`", " t ", " t:"),
    "loss scale": ("loss scale",),
}
# A rank, modulo their number, or all.
RANKS = st.sampled_from([None, 0, 1, 2])
RANK = st.sampled_from([0, 1, 2])
NUMBERS = st.integers(0, 999)

Predict = Callable[[Situation], list[Prediction]]


def draw_sequences(lockstep: Lockstep, kind: str, seed: int, count: int) -> None:
    """Judge so many sequences; on rank 0, within `Lockstep.play`."""
    machine: Any = hypothesis.seed(seed)(lambda: OptimizerMachine(lockstep, kind))
    settings = hypothesis.settings(
        max_examples=count,
        stateful_step_count=COMMANDS,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(machine, settings=settings)


def play(world: Any, comm: Any, stderr: int, kind: str, seed: int, count: int) -> str:
    """Judge so many sequences on all ranks; return how one failed (collective)."""
    lockstep = Lockstep(world, OneRank(comm), stderr)
    with mock.patch.object(overlapped_exchange, "BUCKET_BYTES", BUCKET_BYTES):
        failure = lockstep.play(partial(draw_sequences, lockstep, kind, seed, count))
    return f"CHAINERMN_TEST_SEED={seed}: {failure}" if failure else ""


def quiet(machine: OptimizerMachine) -> bool:
    return all(each.is_quiet for each in machine.situations)


def may_change_on_one(machine: OptimizerMachine) -> bool:
    """Whether it can still be said if all ranks know of a change, whichever one changes."""
    return all(
        not each.apart or each.apart == each.everybody for each in machine.situations
    )


def between_groups(machine: OptimizerMachine) -> bool:
    return all(each.calls == 0 for each in machine.situations)


class OptimizerMachine(RuleBasedStateMachine):
    """One sequence."""

    def __init__(self, lockstep: Lockstep, kind: str) -> None:
        super().__init__()
        self._lockstep, self._kind = lockstep, kind
        self.situations: list[Situation] = []
        self._failed, self._number = False, 0

    @initialize(
        steps=st.sampled_from([3, 2, 1]),
        scaling=st.sampled_from([None, 8.0, "dynamic"]),
        hooks=st.booleans(),
        optimizer=st.sampled_from(list(OPTIMIZERS)),
        on_drift=st.sampled_from(["raise", "raise", "synchronize", "ignore"]),
    )
    def begin(
        self,
        steps: int,
        scaling: float | str | None,
        hooks: bool,
        optimizer: str,
        on_drift: str,
    ) -> None:
        self.config = Config(self._kind, steps, scaling, hooks, optimizer, on_drift)
        self._last = self._lockstep.begin(self.config, 1)
        size, delay = self._lockstep.size, KINDS[self._kind].delay
        start = Situation(size, steps, delay, on_drift)
        self.situations = [start.loaded()]
        self.links, self._unused = ["first", "second"], NONE

    def teardown(self) -> None:
        try:
            if self.situations and not self._failed:
                self._train_on()
        finally:
            if self.situations:
                outcomes = self._lockstep.command("end")
        if (
            self.situations
            and not self._failed
            and any(each.error for each in outcomes)
        ):
            self._fail(f"finalize() raised {outcomes}")

    # Updates.

    @rule(
        count=st.integers(1, 4),
        unused=st.sampled_from(["nobody", "nobody", None, 0, 1, 2]),
        without_loss=st.sampled_from(["nobody", "nobody", "nobody", None, 0, 1, 2]),
    )
    def update(self, count: int, unused: Any, without_loss: Any) -> None:
        """Some ranks don't use the second link, from now on."""
        self._unused = self._ranks(unused)
        for _ in range(count):
            self._update(without_loss=self._ranks(without_loss))

    @precondition(lambda self: self.config.scaling == "dynamic")
    @rule(count=st.integers(1, 2), ranks=RANKS)
    def overflow(self, count: int, ranks: int | None) -> None:
        for _ in range(count):
            self._update(overflowing=self._ranks(ranks))

    @rule(
        ranks=RANKS,
        where=st.sampled_from(["forward", "backward"]),
        within=st.booleans(),
    )
    def fail_in_loss(self, ranks: int | None, where: str, within: bool) -> None:
        """In the next update, or in the next one within a group."""
        if within:
            self._update_within_group()
        self._update(failing=self._ranks(ranks), where=where)

    @precondition(quiet)
    @rule(
        ranks=RANKS,
        where=st.sampled_from(IN_A_STEP),
        overflowing=RANKS,
        count=st.integers(0, 1),
    )
    def fail_in_step(
        self, ranks: int | None, where: str, overflowing: int | None, count: int
    ) -> None:
        """Fail in the next update that steps, and perhaps overflow there."""
        overflows = self.config.scaling == "dynamic" and count
        for _ in range(2 * self.config.steps):
            if not quiet(self):
                return
            self._update(
                failing=self._ranks(ranks),
                where=where,
                overflowing=self._ranks(overflowing) if overflows else NONE,
            )

    @rule()
    def flush(self) -> None:
        self._do(lambda each: each.flush(), "flush")

    @precondition(quiet)
    @rule(ranks=RANKS, where=st.sampled_from(IN_A_STEP))
    def fail_in_flush(self, ranks: int | None, where: str) -> None:
        failing = self._ranks(ranks)
        self._do(
            lambda each: each.flush(failing, where),
            "flush",
            failing=tuple(failing),
            where=where,
        )

    # Parameters that change.

    @precondition(may_change_on_one)
    @rule(ranks=RANKS, name=st.sampled_from(["first", "second"]), seed=NUMBERS)
    def replace_a_link(self, ranks: int | None, name: str, seed: int) -> None:
        self._replace(self._ranks(ranks), name, seed)

    @precondition(lambda self: len(self.links) < MOST_LINKS)
    @precondition(may_change_on_one)
    @rule(
        ahead=RANKS,
        replacing=st.sampled_from(["nobody", 0, 1, 2]),
        calls=st.lists(st.sampled_from(["update", "flush"]), max_size=2),
        seed=NUMBERS,
    )
    def add_a_link(
        self, ahead: int | None, replacing: Any, calls: list[str], seed: int
    ) -> None:
        """On all ranks, of which one may replace another; or on one, and then on the others."""
        name = f"added{len(self.links)}"
        self.links.append(name)
        some = self._ranks(ahead)
        if ahead is not None:
            self._replace(some, name, seed, differ=True)
            for call in calls:
                self._update() if call == "update" else self.flush()
        self._replace(self._ranks(None), name, seed, differ=False)
        if replacing != "nobody":
            self._replace(self._ranks(replacing), "first", seed)

    @precondition(may_change_on_one)
    @rule(ranks=RANKS, seed=NUMBERS)
    def set_up_another_model(self, ranks: int | None, seed: int) -> None:
        if ranks is not None and any(each.is_local for each in self.situations):
            return  # only this rank's next update would be collective
        some = self._ranks(ranks)

        def predict(each: Situation) -> list[Prediction]:
            then = each.set_up(some)
            if ranks is not None:
                return each.nothing(then)
            return [*each.nothing(then), *each.nothing(then.ended())]

        self._do(predict, "setup", tuple(some), seed)

    # States that change.

    @precondition(quiet)
    @precondition(lambda self: isinstance(self.config.scaling, float))
    @rule(
        scale=st.sampled_from(SCALES),
        first=st.sampled_from([None, None, 0, 1, 2]),
        synchronizes=st.booleans(),
        within=st.booleans(),
    )
    def set_loss_scale(
        self, scale: float, first: int | None, synchronizes: bool, within: bool
    ) -> None:
        """On all ranks; or on one first, which all hear of."""
        if within:
            self._update_within_group()
        if first is not None and self.config.on_drift == "raise":
            present = float(self._last[0].state["loss scale"])
            self._set_loss_scale(self._ranks(first), present * 2)
            self._expect_in_update(("loss scale",))
            if synchronizes:
                self.synchronize()
                return
        self._set_loss_scale(self._ranks(None), scale)
        self.situations = [each.drifting(()).copied() for each in self.situations]

    @precondition(quiet)
    @rule(what=st.sampled_from(list(DRIFTS)), rank=RANK)
    def drift(self, what: str, rank: int) -> None:
        """Until `synchronize()`."""
        if what == "loss scale" and (self.config.scaling, self.config.on_drift) != (
            "dynamic",
            "raise",
        ):
            return
        some = next(iter(self._ranks(rank)))
        self._do(lambda each: each.nothing(), "disturb", some, what)
        # It has momenta.
        if any(each.state != self._last[0].state for each in self._last):
            self._expect_in_update(DRIFTS[what])
            self.synchronize()

    @rule()
    def synchronize(self) -> None:
        self._do(lambda each: each.synchronize(), "synchronize")
        if len({each.persistent for each in self._last}) > 1:
            self._fail("persistent values differ after synchronize()")

    @rule(what=st.sampled_from([*DRIFTS, "epoch", "persistent"]), rank=RANK)
    def disturb_and_synchronize(self, what: str, rank: int) -> None:
        if what != "loss scale" or self.config.scaling is not None:
            some = next(iter(self._ranks(rank)))
            self._do(lambda each: each.nothing(), "disturb", some, what)
            self.synchronize()

    # Other optimizers with the same state.

    @rule()
    def go_on_with_a_copy(self) -> None:
        self._do(
            lambda each: each.nothing(each.copied(), state="own"), "go_on_with_a_copy"
        )

    @rule(ranks=RANKS, assume=st.booleans())
    def save_and_load(self, ranks: int | None, assume: bool) -> None:
        """On all ranks, or on one alone."""
        assume = assume and ranks is None and quiet(self)
        in_group = not between_groups(self)

        def predict(each: Situation) -> list[Prediction]:
            if ranks is None:
                return each.nothing(
                    each.copied() if assume else each.loaded(), state="own"
                )
            return each.nothing(each.change(each.everybody).ended().copied())

        self._do(predict, "save_and_load", tuple(self._ranks(ranks)), assume)
        if ranks is not None and in_group:  # ranks are at different updates of a group
            self.synchronize()

    # How it is done.

    def _ranks(self, drawn: Any) -> Ranks:
        if drawn == "nobody":
            return NONE
        size = self._lockstep.size
        return frozenset(range(size)) if drawn is None else frozenset({drawn % size})

    def _update_within_group(self) -> None:
        """Update until a group has begun, and its last update is not the next, if it can be."""
        for _ in range(self.config.steps - 1):
            if not any(each.is_local for each in self.situations):
                self._update()

    def _update(self, **kwds: Any) -> None:
        self._number += 1
        given = {
            key: tuple(it) if isinstance(it, frozenset) else it
            for key, it in kwds.items()
        }
        given = {key: it for key, it in given.items() if it != ()}
        if self._unused:
            given["unused"] = tuple(self._unused)
        self._do(lambda each: each.update(**kwds), "update", self._number, **given)

    def _replace(
        self, ranks: Ranks, name: str, seed: int, differ: bool | None = None
    ) -> None:
        self._do(
            lambda each: each.nothing(each.change(ranks, differ)),
            "replace",
            tuple(ranks),
            name,
            seed,
        )

    def _set_loss_scale(self, ranks: Ranks, scale: float) -> None:
        self._do(lambda each: each.nothing(), "set_loss_scale", tuple(ranks), scale)

    def _expect_in_update(self, mentions: tuple[str, ...]) -> None:
        """Update until ranks compare what differs between them."""
        self.situations = [each.drifting(mentions) for each in self.situations]
        for _ in range(self.config.steps):
            if any(each.is_local for each in self.situations):
                self._update()
        self._update()

    def _do(self, predict: Predict, name: str, *args: Any, **kwds: Any) -> None:
        predictions = [predict(each) for each in self.situations]
        outcomes = self._lockstep.command(name, *args, **kwds)
        left, why = judge(self.situations, predictions, self._last, outcomes)
        if not left:
            self._fail(f"{self.config}\n{why}")
        self.situations, self._last = left, outcomes

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._lockstep.fail(reason)

    def _train_on(self) -> None:
        """Whatever has happened, all goes on as ever."""
        self.flush()
        for _ in range(2 * self.config.steps):
            self._update()
        self.flush()

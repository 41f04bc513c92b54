"""What commands of a drawn training should do, as far as the manual says.

Where it leaves a choice, each of several situations may be the present one, until
outcomes tell.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.train.optimizer_machine.commands import Outcome

FINE, PLANTED, PEER, MISMATCH = "", "planted", "peer", "mismatch"
MOST_NAMED = 8  # differences in a text
Ranks = frozenset[int]
NONE: Ranks = frozenset()


@dataclass(frozen=True)
class Prediction:
    """What a command may do, and the situation that follows."""

    then: Situation
    errors: tuple[frozenset[str], ...]  # those that each rank may raise
    # Of the states: "own" (each rank's as before), "rank 0's" (as before), "stepped"
    # (alike, so many steps after rank 0's), "any".
    state: str = "own"
    steps: int = 0
    moved: bool = False  # whether parameters must have changed
    mentions: tuple[str, ...] = ()  # one of them is in each error's text
    warned: Ranks = NONE

    def refutation(self, before: list[Outcome], after: list[Outcome]) -> str:
        """Return what is otherwise; empty if nothing is."""
        for rank, (now, allowed) in enumerate(zip(after, self.errors, strict=True)):
            if now.error not in allowed:
                return f"rank {rank} raised {now.error or 'nothing'!r}, not {sorted(allowed)}"
            if self.mentions and not any(each in now.text for each in self.mentions):
                return f"rank {rank} does not mention {self.mentions}: {now.text}"
            if bool(now.warned) != (rank in self.warned):
                return f"rank {rank} warned {now.warned!r}"
        if self.state == "any":
            return ""
        if self.state == "own":
            return _difference("that before", before, after)
        if self.state == "rank 0's":
            return _difference("rank 0's before", before[:1] * len(after), after)
        if {each.t for each in after} != {before[0].t + self.steps}:
            return f"t was {before[0].t} on rank 0, and is {[each.t for each in after]}"
        if self.moved and all(
            value == before[0].state.get(key)
            for key, value in after[0].state.items()
            if key.startswith("/")
        ):
            return "no parameter has moved"
        return _difference("rank 0's now", after[:1] * len(after), after)


def _difference(whose: str, expected: list[Outcome], found: list[Outcome]) -> str:
    wrong = [
        f"{key!r} of rank {rank}"
        for rank, (one, other) in enumerate(zip(expected, found, strict=True))
        for key in sorted(one.state.keys() | other.state.keys())
        if one.state.get(key, b"-") != other.state.get(key, b"-")
    ]
    more = f", and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
    return f"other than {whose}: {', '.join(wrong[:MOST_NAMED])}{more}" if wrong else ""


@dataclass(frozen=True)
class Situation:
    """Of ranks that train together."""

    size: int
    steps: int  # in a group
    delay: int
    on_drift: str
    calls: int = 0  # so far in the present group
    overflows: bool = False  # in its gradients
    in_flight: bool = False
    flight_overflows: bool = False
    apart: Ranks = NONE  # whose last step failed
    changed: Ranks = NONE  # whose set of parameters is not the one that ranks share
    keeps: bool = False  # what is accumulated and in flight when all get rank 0's state
    differ: bool = False  # in the names of their parameters
    drifted: tuple[str, ...] = ()  # what an error must mention
    # Whether the next update has nothing to agree on before the loss but the reasons
    # above. Else all may agree then, and the update counts, whatever the reason of some
    # is.
    prepared: bool = False

    @property
    def everybody(self) -> Ranks:
        return frozenset(range(self.size))

    @property
    def reasons(self) -> Ranks:
        """Ranks that know of a reason to get rank 0's state."""
        return self.apart | self.changed

    @property
    def is_quiet(self) -> bool:
        return not (self.reasons or self.differ or self.drifted)

    @property
    def is_local(self) -> bool:
        """Whether the next update does not communicate."""
        return 0 < self.calls < self.steps - 1

    def change(self, ranks: Ranks, differ: bool | None = None) -> Situation:
        """Some ranks have other parameters now."""
        differ = self.differ if differ is None else differ
        return replace(self, changed=self.changed | ranks, differ=differ)

    def set_up(self, ranks: Ranks) -> Situation:
        """Some ranks train another model now."""
        return replace(self.change(ranks), keeps=False)

    def loaded(self) -> Situation:
        """All have loaded their states, which none knows of the others."""
        return replace(self.change(self.everybody), keeps=True, prepared=False)

    def copied(self) -> Situation:
        """All go on with another optimizer of the same state."""
        return replace(self, prepared=False)

    def drifting(self, mentions: tuple[str, ...]) -> Situation:
        """Something differs between ranks, which errors shall mention."""
        return replace(self, drifted=mentions)

    def ended(self) -> Situation:
        """Nothing is accumulated, nor in flight."""
        return replace(
            self,
            calls=0,
            overflows=False,
            in_flight=False,
            flight_overflows=False,
            keeps=False,
        )

    def shared(self) -> list[Situation]:
        """All have got rank 0's state."""
        now = replace(self, apart=NONE, changed=NONE, drifted=())
        may_keep = self.keeps or not self.changed
        return [now.ended(), *([replace(now, keeps=False)] if may_keep else [])]

    # What commands do.

    def update(
        self,
        without_loss: Ranks = NONE,
        overflowing: Ranks = NONE,
        failing: Ranks = NONE,
        where: str = "forward",
    ) -> list[Prediction]:
        in_loss = failing if where in ("forward", "backward") else NONE
        if self.is_local:
            then = replace(
                self,
                calls=self.calls + 1,
                overflows=self.overflows or bool(overflowing - in_loss),
            )
            return [Prediction(then, self._errors(in_loss))]
        if self.differ:
            # Before gradients are dropped, or after.
            errors = self._errors(self.everybody, MISMATCH)
            return [Prediction(then, errors) for then in (self, self.ended())]
        now = replace(self, prepared=True)
        all_know = self.changed == self.everybody
        possible = {all_know and not without_loss, not (self.prepared or without_loss)}
        return [
            each
            for before_loss in possible
            for situation in ([self] if self.prepared else [self, now])
            for each in situation._agreed(
                before_loss, overflowing, failing, in_loss, where
            )
        ]

    def _agreed(
        self,
        before_loss: bool,
        overflowing: Ranks,
        failing: Ranks,
        in_loss: Ranks,
        where: str,
    ) -> list[Prediction]:
        """Predict a collective update."""
        if in_loss:
            return self._failing_loss(in_loss, before_loss and bool(self.reasons))
        if self.reasons and not before_loss:
            return [
                Prediction(then, self._errors(), "rank 0's") for then in self.shared()
            ]
        if self.reasons:
            return [
                counted
                for then in self.shared()
                for counted in then._count(
                    "rank 0's", bool(overflowing), failing, where
                )
            ]
        if self.drifted and self.on_drift == "raise":
            errors = self._errors(self.everybody, MISMATCH)
            return [Prediction(self, errors, mentions=self.drifted)]
        if self.drifted and self.on_drift == "synchronize" and before_loss:
            return [
                replace(counted, warned=frozenset({0}))
                for then in self.shared()
                for counted in replace(then, prepared=True)._count(
                    "rank 0's", bool(overflowing), failing, where
                )
            ]
        if self.drifted and self.on_drift == "synchronize":
            return [
                Prediction(then, self._errors(), "rank 0's", warned=frozenset({0}))
                for then in self.shared()
            ]
        return self._count("own", bool(overflowing), failing, where)

    def flush(self, failing: Ranks = NONE, where: str = "") -> list[Prediction]:
        if self.differ:
            # Before gradients are dropped, or after.
            errors = self._errors(self.everybody, MISMATCH)
            return [Prediction(then, errors) for then in (self, self.ended())]
        if self.reasons:
            shared = [now._flush_shared("rank 0's", NONE, "") for now in self.shared()]
            # Before the first update of all there may be nothing to do.
            may_wait = self.keeps and not (self.calls or self.in_flight)
            return [*shared, *([Prediction(self, self._errors())] if may_wait else [])]
        return [self._flush_shared("own", failing, where)]

    def synchronize(self) -> list[Prediction]:
        return [Prediction(self.shared()[0], self._errors(), "rank 0's")]

    def nothing(
        self, then: Situation | None = None, state: str = "any"
    ) -> list[Prediction]:
        """Predict what does not communicate."""
        return [Prediction(then or self, self._errors(), state)]

    def _failing_loss(self, failing: Ranks, before_loss: bool) -> list[Prediction]:
        if before_loss:
            errors = self._errors(failing, PLANTED, others=PEER)
            return [Prediction(then, errors, "rank 0's") for then in self.shared()]
        errors = self._errors(failing, PLANTED, others=PEER)
        if not self.reasons:
            return [Prediction(self, errors)]
        # Ranks that wait for others before their loss hear of the failure there.
        errors = tuple(each | {PEER} for each in errors)
        shared = [Prediction(then, errors, "rank 0's") for then in self.shared()]
        return [Prediction(self, errors), *shared]

    def _count(
        self, state: str, overflows: bool, failing: Ranks, where: str
    ) -> list[Prediction]:
        """Predict an update whose gradients count; it may complete the group and step."""
        overflows = overflows or self.overflows
        if self.calls + 1 < self.steps:
            then = replace(self, calls=self.calls + 1, overflows=overflows)
            return [Prediction(then, self._errors(), state)]
        then = replace(self, calls=0, overflows=False)
        used = overflows
        if self.delay:
            used = self.flight_overflows
            then = replace(then, in_flight=True, flight_overflows=overflows)
            if not self.in_flight:
                return [Prediction(then, self._errors(), state)]
        return [then._step([used], failing, where)]

    def _flush_shared(self, state: str, failing: Ranks, where: str) -> Prediction:
        overflows = [self.flight_overflows] * self.in_flight + [self.overflows] * (
            self.calls > 0
        )
        then = replace(self.ended(), prepared=self.prepared or not self.changed)
        if not overflows:
            return Prediction(then, self._errors(), state)
        return then._step(overflows, failing, where, others=(FINE, PEER))

    def _step(
        self,
        overflows: list[bool],
        failing: Ranks,
        where: str,
        others: tuple[str, ...] = (FINE,),
    ) -> Prediction:
        """Predict steps, one for each element; those that overflow call no update rule."""
        if where == "rule" and all(overflows):
            failing = NONE
        if failing:
            then = replace(self, apart=failing, keeps=False)
            errors = tuple(
                frozenset({PLANTED} if rank in failing else others)
                for rank in range(self.size)
            )
            return Prediction(then, errors, "any")
        ignored = self.drifted and self.on_drift == "ignore"
        return Prediction(
            self,
            self._errors(),
            "any" if ignored else "stepped",
            len(overflows),
            moved=not all(overflows),
        )

    def _errors(
        self, failing: Ranks = NONE, error: str = PLANTED, others: str = FINE
    ) -> tuple[frozenset[str], ...]:
        return tuple(
            frozenset({error if rank in failing else others})
            for rank in range(self.size)
        )


def judge(
    situations: list[Situation],
    predictions: list[list[Prediction]],
    before: list[Outcome],
    after: list[Outcome],
) -> tuple[list[Situation], str]:
    """Return the situations that outcomes leave, each once; if none, why each is refuted."""
    left: dict[Situation, None] = {}
    why = []
    for situation, possible in zip(situations, predictions, strict=True):
        for each in possible:
            if reason := each.refutation(before, after):
                why.append(f"if it was {situation}: {reason}")
            else:
                left[each.then] = None
    texts = [
        f"rank {rank}: {each.error}: {each.text}" for rank, each in enumerate(after)
    ]
    return list(left), "\n".join(
        [*why, *(each for each in texts if not each.endswith(": : "))]
    )

"""Sees to it that all ranks train the same parameters: rank 0's, whenever any rank's change."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, NoReturn

import numpy as np

from chainermn_comm import CommunicatorBase, RankMismatchError

from .agreement import call_or_raise, gather_or_raise, located
from .copying import SharesCommunicator
from .mixed_precision import broadcast_masters, loss_scaling, require_same_loss_scaling
from .persistents import take_missing_persistents
from .timing import part


class Views(NamedTuple):
    """What holds on any rank, and the number of ranks to which no loss function was given.

    Nothing else has been agreed on if ranks are ``apart``: some do not update, but flush.
    """

    changed: bool
    incomplete: bool
    without_loss: int
    apart: bool


class SharedParameters(SharesCommunicator):
    """Knows which parameters, and which loss scale, all ranks are known to share.

    Args:
        communicator: the ranks.
        settings: the values of the optimizer's arguments that must be equal on all ranks.
    """

    def __init__(self, communicator: CommunicatorBase, settings: dict[str, Any]) -> None:
        self.communicator = communicator
        self._settings = settings
        # The parameters that were initialised at the last broadcast. They are kept, not
        # their ids: a new parameter may be given the id of one that is gone.
        self._known: list[Any] | None = None
        self._scaling: tuple[Any, ...] | None = None

    def agree(self, optimizer: Any, without_loss: bool) -> Views:
        """Whether on any rank parameters have changed, or some are not initialised (collective).

        One sum of a few integers, since it is part of every update.

        Raises:
            RuntimeError: the optimizer has no model (PeerError on the ranks whose has one).
            RankMismatchError: ranks scale their losses, or have set the optimizer, differently.
        """
        target = optimizer.target
        params = [] if target is None else list(target.params())
        ready = [param for param in params if param.is_initialized]
        old = self._known
        changed = old is None or len(old) != len(ready) or not all(map(operator.is_, old, ready))
        incomplete = len(ready) < len(params)
        rescaled = self._scaling != loss_scaling(optimizer)
        total = self.count(changed, incomplete, without_loss, rescaled, target is None, False)
        if total[5]:
            return Views(False, False, 0, True)
        if total[4]:
            error = RuntimeError("the optimizer has no model: call its `setup(model)` first")
            gather_or_raise(self.communicator, error if target is None else None)
        if total[3]:
            self._require_same_settings(optimizer)
            self.note_loss_scaling(optimizer)
        return Views(bool(total[0]), bool(total[1]), int(total[2]), False)

    def count_at_flush(self, *numbers: int) -> tuple[Any, bool]:
        """Sums as of `count`, of five at most, and whether some ranks are in `agree` (collective).

        In all but its meaning it is the same call as that of `agree`, so that ranks find out.
        """
        padding = [0] * (5 - len(numbers))
        total = self.count(*numbers, *padding, True)
        return total[: len(numbers)], bool(total[5] < self.communicator.size)

    def _require_same_settings(self, optimizer: Any) -> None:
        """Raise RankMismatchError on all ranks unless theirs are the same (collective)."""
        communicator = self.communicator
        views = call_or_raise(
            communicator,
            lambda: ({**self._settings, **_described(optimizer)}, loss_scaling(optimizer)),
        )
        for name in views[0][0]:
            values = [settings[name] for settings, _ in views]
            if len(set(values)) > 1:
                raise RankMismatchError(
                    f"rank {communicator.rank}: create_multi_node_optimizer needs the same {name} "
                    "on all ranks, not "
                    + ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                )
        require_same_loss_scaling(communicator.rank, [scaling for _, scaling in views])

    def count(self, *numbers: int) -> Any:
        """Each number's sum over ranks: int64 of shape (len(numbers),) (collective)."""
        with part("waiting"), located("a multi-node optimizer"):
            return self.communicator.allreduce(np.array(numbers, dtype=np.int64))

    def note_loss_scaling(self, optimizer: Any) -> None:
        """All ranks scale their losses alike now."""
        self._scaling = loss_scaling(optimizer)

    def note_parameters(self, target: Any) -> None:
        """All ranks have the same parameters now."""
        self._known = [param for param in target.params() if param.is_initialized]

    def forget(self) -> None:
        """This rank's parameters may not be the others': the next update broadcasts."""
        self._known = None

    def broadcast(self, target: Any) -> None:
        """Give rank 0's parameters to all ranks (collective)."""
        with part("wire"):
            self.communicator.bcast_data(target)
            broadcast_masters(self.communicator, target)
            take_missing_persistents(self.communicator, target)
        self.note_parameters(target)

    def broadcast_new(self, target: Any) -> set[str]:
        """The names of parameters that rank 0 has got since the last broadcast (collective).

        Rank 0's are all that counts: the other ranks are about to get them. After a start or a
        resume there are none.
        """
        known = set(map(id, self._known or ()))
        names = [
            name
            for name, param in target.namedparams()
            if self._known is not None and id(param) not in known
        ]
        return set(self.communicator.bcast_obj(names))

    def initialize_as_others_did(self, target: Any) -> None:
        """Initialise the parameters whose shapes only other ranks have learnt (collective).

        Any rank, rank 0 too, may be the one without examples.
        """
        named = list(target.namedparams())
        known = {name: param.shape for name, param in named if param.is_initialized}
        shapes: dict[str, tuple[int, ...]] = {}
        for others in gather_or_raise(self.communicator, None, known):
            shapes = others | shapes
        error: BaseException | None = None
        try:
            for name, param in named:
                if not param.is_initialized and name in shapes:
                    param.initialize(shapes[name])
        except BaseException as exception:
            error = exception
        gather_or_raise(self.communicator, error)


def _described(optimizer: Any) -> dict[str, str]:
    """The class and the numbers that are set: with others, parameters drift apart."""
    hyperparam: Any = getattr(optimizer, "hyperparam", None)  # chainer.Optimizer has none
    values = {} if hyperparam is None else hyperparam.get_dict()
    numbers = {name: each for name, each in values.items() if isinstance(each, int | float)}
    return {
        "optimizer": type(optimizer).__name__,
        "hyperparameters": ", ".join(f"{name}={float(numbers[name])}" for name in sorted(numbers)),
    }


def raise_out_of_step(
    communicator: CommunicatorBase, method: str, calls: int, steps: int
) -> NoReturn:
    """Say where each rank is, since some are in `flush` and some in `update` (collective).

    Args:
        communicator: the ranks.
        method: where this rank is.
        calls: updates that it has made of those that make a step.
        steps: how many these are.
    """
    places = communicator.allgather_obj((method, calls))
    raise RankMismatchError(
        f"rank {communicator.rank}: some ranks call flush() and others update(), so they "
        "haven't made the same number of updates: "
        + ", ".join(
            f"rank {rank} calls {each}() after {calls} of the {steps} updates of a step"
            for rank, (each, calls) in enumerate(places)
        )
    )

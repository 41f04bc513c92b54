"""Parameters kept equal on all ranks: rank 0's, whenever any rank's set of them changes."""

from __future__ import annotations

import operator
import struct
from typing import Any

from chainermn_comm import CommunicatorBase

from ..collective_errors import add_mismatch_hint, raise_on_all_ranks, run_on_all_ranks
from ..persistents import broadcast_missing_persistents
from ..profiling import region
from ..wrappers import UnpicklableMixin
from .mixed_precision import broadcast_master_weights, describe_loss_scaling, loss_scaling

OPERATION = "update"


class ParameterSynchronizer(UnpicklableMixin):
    """Knows which parameters, and which loss scale, are equal on all ranks."""

    def __init__(self, communicator: CommunicatorBase, settings: dict[str, Any]) -> None:
        self.communicator = communicator
        self._settings = settings  # arguments of the optimizer that must be equal on all ranks
        # The parameters that were initialised at the last broadcast. References are kept, not
        # ids: a new parameter may be given the id of one that was deleted.
        self._synchronized: list[Any] | None = None
        self._scaling: tuple[Any, ...] | None = None

    def exchange_flags(
        self, call: str, optimizer: Any, without_loss: bool
    ) -> tuple[bool, bool, int]:
        """Find out what holds on any rank (collective: one handshake, part of every update).

        Returns whether the set of initialised parameters has changed on any rank, whether a
        parameter isn't initialised on any, and how many ranks have no loss function. All raise if
        an optimizer has no model, or if loss scales or optimizers are set differently.
        """
        target = optimizer.target
        params = [] if target is None else list(target.params())
        ready = [param for param in params if param.is_initialized]
        old = self._synchronized
        changed = old is None or len(old) != len(ready) or not all(map(operator.is_, old, ready))
        uninitialized = len(ready) < len(params)
        rescaled = self._scaling != loss_scaling(optimizer)
        total = self.sum_flags(call, changed, uninitialized, without_loss, rescaled, target is None)
        if total[4]:
            with raise_on_all_ranks(self.communicator, OPERATION):
                if target is None:
                    raise RuntimeError("the optimizer has no model: call its `setup(model)` first")
        if total[3]:
            scaling = describe_loss_scaling(optimizer)
            settings = {**self._settings, **_describe(optimizer), **scaling}
            self.communicator.handshake("create_multi_node_optimizer", settings.items())
            self.mark_loss_scaling_synchronized(optimizer)
        return bool(total[0]), bool(total[1]), total[2]

    def sum_flags(self, call: str, *numbers: int) -> list[int]:
        """Return each number's sum over ranks (collective).

        RankMismatchError on all if ``call``, what they do and after how many updates, differs.
        """
        form = struct.Struct(f"<{len(numbers)}q")
        signature, payload = (("call", call),), form.pack(*numbers)
        with region("waiting"), add_mismatch_hint("a multi-node optimizer"):
            rows = self.communicator.handshake(OPERATION, signature, payload=payload)
        return [sum(column) for column in zip(*map(form.unpack, rows), strict=True)]

    def mark_loss_scaling_synchronized(self, optimizer: Any) -> None:
        """Record that all ranks scale their losses alike now."""
        self._scaling = loss_scaling(optimizer)

    def mark_synchronized(self, target: Any) -> None:
        """Record that all ranks have the same parameters now."""
        self._synchronized = [param for param in target.params() if param.is_initialized]

    def invalidate(self) -> None:
        """Record that this rank's parameters may differ: the next update broadcasts."""
        self._synchronized = None

    def broadcast(self, target: Any) -> None:
        """Give rank 0's parameters to all ranks (collective)."""
        with region("communication"):
            self.communicator.bcast_data(target)
            broadcast_master_weights(self.communicator, target)
            broadcast_missing_persistents(self.communicator, target)
        self.mark_synchronized(target)

    def new_parameters(self, target: Any) -> set[str]:
        """Return the names of parameters that are new on rank 0, which others get (collective).

        They are new since the last broadcast; after a start or a resume there are none.
        """
        known = target.params() if self._synchronized is None else self._synchronized
        ids = set(map(id, known))
        names = [name for name, param in target.namedparams() if id(param) not in ids]
        return set(self.communicator.bcast_obj(names))

    def initialize_missing(self, target: Any) -> None:
        """Initialise parameters whose shapes only ranks that had examples know (collective)."""
        named = list(target.namedparams())
        known = {name: param.shape for name, param in named if param.is_initialized}
        shapes: dict[str, tuple[int, ...]] = {}
        for others in run_on_all_ranks(self.communicator, OPERATION, lambda: known):
            shapes = others | shapes
        with raise_on_all_ranks(self.communicator, OPERATION):
            for name, param in named:
                if not param.is_initialized and name in shapes:
                    param.initialize(shapes[name])


def _describe(optimizer: Any) -> dict[str, str]:
    """Return the class and the numbers that are set: with others, parameters drift apart."""
    hyperparam: Any = getattr(optimizer, "hyperparam", None)  # chainer.Optimizer has none
    values = {} if hyperparam is None else hyperparam.get_dict()
    numbers = {name: each for name, each in values.items() if isinstance(each, int | float)}
    return {
        "optimizer": type(optimizer).__name__,
        "hyperparameters": ", ".join(f"{name}={float(numbers[name])}" for name in sorted(numbers)),
    }

"""Parameters kept equal on all ranks: rank 0's, whenever any rank's set of them changes."""

from __future__ import annotations

from typing import Any

from chainermn_comm import CommunicatorBase

from ..collective_errors import raise_on_all_ranks, run_on_all_ranks, values_of_first_holders
from ..persistents import broadcast_missing_persistents
from ..profiling import region
from ..wrappers import UnpicklableMixin
from .agreement import OPERATION, STEADY, Flags
from .mixed_precision import broadcast_master_weights, describe_loss_scaling, loss_scaling
from .optimizer_state import broadcast_state
from .parameter_set import ParameterSet


class ParameterSynchronizer(UnpicklableMixin):
    """Knows which parameters, and which loss scale, are equal on all ranks."""

    def __init__(self, communicator: CommunicatorBase, settings: dict[str, Any]) -> None:
        self.communicator = communicator
        self._settings = settings  # arguments of the optimizer that must be equal on all ranks
        self._synchronized: ParameterSet | None = None
        self._is_apart = False
        self._scaling: tuple[Any, ...] | None = None

    def params(self, target: Any) -> ParameterSet:
        """Return the parameters that ranks share, or the model's where they share none yet."""
        return self._synchronized or ParameterSet(target)

    def flags(self, optimizer: Any) -> Flags:
        """Return what this rank has to tell; ``STEADY`` if it has nothing."""
        target, known = optimizer.target, self._synchronized
        if target is None:
            return Flags(changed=1, without_model=1)
        changed = known is None or not known.is_still_of(target)
        if known is None or changed:
            known = ParameterSet(target)
        rescaled = self._scaling != loss_scaling(optimizer)
        if not (changed or rescaled or self._is_apart):
            return STEADY
        return Flags(
            changed=int(changed),
            uninitialized=int(known.has_uninitialized),
            rescaled=int(rescaled),
            apart=int(self._is_apart),
        )

    def require_alike(self, optimizer: Any, own: Flags, total: Flags) -> None:
        """Raise on all ranks if one has no model, or ranks are set differently (collective)."""
        if total.without_model:
            with raise_on_all_ranks(self.communicator, OPERATION):
                if own.without_model:
                    raise RuntimeError("the optimizer has no model: call its `setup(model)` first")
        if total.rescaled:
            scaling = describe_loss_scaling(optimizer)
            settings = {**self._settings, **_describe(optimizer), **scaling}
            self.communicator.handshake("create_multi_node_optimizer", settings.items())
            self.mark_loss_scaling_synchronized(optimizer)

    def mark_loss_scaling_synchronized(self, optimizer: Any) -> None:
        """Record that all ranks scale their losses alike now."""
        self._scaling = loss_scaling(optimizer)

    def mark_synchronized(self, target: Any) -> None:
        """Record that all ranks have the same parameters now."""
        self._synchronized, self._is_apart = ParameterSet(target), False

    def mark_apart(self) -> None:
        """Record that this rank may not have stepped as others did: the next update broadcasts."""
        self._is_apart = True

    def broadcast(self, optimizer: Any, and_state: bool) -> None:
        """Give rank 0's parameters to all ranks, and the optimizer's state (collective)."""
        target = optimizer.target
        with region("communication"):
            self.communicator.bcast_data(target)
            broadcast_master_weights(self.communicator, target)
            broadcast_missing_persistents(self.communicator, target)
            if and_state:
                broadcast_state(self.communicator, optimizer)
                self.mark_loss_scaling_synchronized(optimizer)
        self.mark_synchronized(target)

    def new_parameters(self, target: Any) -> list[Any]:
        """Return this rank's parameters that are new, or some other rank's are (collective).

        They are new since the last broadcast; after a start or a resume there are none.
        """
        known = self._synchronized
        ids = set(map(id, (known or ParameterSet(target)).params))
        named = list(target.namedparams())
        new = [name for name, param in named if id(param) not in ids]
        names = set().union(*run_on_all_ranks(self.communicator, OPERATION, lambda: new))
        return [param for name, param in named if name in names]

    def initialize_missing(self, target: Any) -> None:
        """Initialise parameters whose shapes only ranks that had examples know (collective)."""
        named = list(target.namedparams())
        known = {name: param.shape for name, param in named if param.is_initialized}
        lacking = {name for name, _ in named} - known.keys()
        shapes = values_of_first_holders(
            self.communicator, OPERATION, lacking, {*known}, known.__getitem__
        )
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

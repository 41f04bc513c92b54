"""An extension that runs on one rank only."""

from __future__ import annotations

import operator
from typing import Any

from chainermn_comm import CommunicatorBase
from chainermn_comm.watchdog import alone

from ..collective_errors import require_communicator
from ..wrappers import AttributeProxy, UnpicklableMixin


def on_rank(extension: Any, comm: CommunicatorBase, rank: int = 0) -> OneRankExtension:
    """Make an extension run on one rank only, without the other ranks waiting for it.

    All ranks extend their trainers with it alike, with no ``if comm.rank == 0``::

        trainer.extend(on_rank(extensions.LogReport(), comm))
        trainer.extend(on_rank(extensions.PrintReport(["epoch", "main/loss"]), comm))

    Name, trigger, priority and every other attribute are those of ``extension``. On other ranks
    it is registered too, under the same name, but does nothing: it is not called, initialised,
    finalised or notified of errors, and has no state in snapshots. A snapshot that ``rank`` took
    can thus be loaded on all ranks.

    It is for extensions that only watch: reports, plots, progress bars, snapshots. One that
    changes training, such as a learning rate schedule, must run on all ranks.

    Args:
        extension: anything that ``Trainer.extend`` takes: an extension, a function made one
            by :func:`chainer.training.make_extension`, or a plain function.
        comm: says which rank this is; nothing is communicated.
        rank: the rank where the extension runs.

    Returns:
        The extension to give to ``Trainer.extend``.

    Raises:
        TypeError: ``extension`` can't be called, or communicates (as a multi-node evaluator
            does), so that all ranks must run it; ``comm`` is not a communicator.
        ValueError: there is no such rank.
    """
    require_communicator(comm, "on_rank")
    if not callable(extension):
        raise TypeError(f"on_rank needs an extension, not {type(extension).__name__}")
    if isinstance(extension, UnpicklableMixin):
        raise TypeError(
            f"{type(extension).__name__} communicates, so it has to run on all ranks: give it to "
            "Trainer.extend as it is"
        )
    if not 0 <= operator.index(rank) < comm.size:
        raise ValueError(f"there is no rank {rank}; ranks go from 0 to {comm.size - 1}")
    return OneRankExtension(extension, comm.rank == rank)


class OneRankExtension(AttributeProxy):
    """The extension ``actual`` on one rank, and a stand-in that does nothing on the others."""

    _OWN = frozenset({"actual", "here"})

    def __init__(self, actual: Any, here: bool) -> None:
        super().__init__(actual)
        self.here = here  # whether it runs on this rank

    @property
    def __name__(self) -> str:
        name: str = self.actual.__name__
        return name

    def __call__(self, trainer: Any) -> Any:
        if not self.here:
            return None
        name = getattr(self.actual, "__name__", type(self.actual).__name__)
        with alone(f"on_rank({name})"):
            return self.actual(trainer)

    def initialize(self, trainer: Any) -> None:
        self._call("initialize", trainer)

    def finalize(self) -> None:
        self._call("finalize")

    def on_error(self, trainer: Any, exc: Exception, tb: Any) -> None:
        self._call("on_error", trainer, exc, tb)

    def serialize(self, serializer: Any) -> None:
        self._call("serialize", serializer)

    def _call(self, event: str, *args: Any) -> None:
        handler = getattr(self.actual, event, None)  # functions have none, or None
        if self.here and handler is not None:
            handler(*args)

"""An extension that runs on one rank alone."""

from __future__ import annotations

from typing import Any

from chainermn_comm import CommunicatorBase

from ..collective_errors import require_communicator, require_integer
from ..wrappers import AttributeProxy
from .evaluator import is_multi_node_evaluator


def on_rank(extension: Any, comm: CommunicatorBase, rank: int = 0) -> OneRankExtension:
    """Make an extension that runs on one rank alone (not collective).

    All ranks extend their trainers with it, without an ``if comm.rank == 0``::

        trainer.extend(on_rank(extensions.LogReport(), comm))
        trainer.extend(on_rank(extensions.PrintReport(["epoch", "main/loss"]), comm))

    Name, trigger, priority and all other attributes are those of ``extension``. On other
    ranks it is registered under the same name but does nothing: it is not called,
    initialised, finalised or notified of errors, and has no state in snapshots. So all
    ranks can load a snapshot that ``rank`` has taken.

    Use it for extensions that only watch: reports, plots, progress bars, snapshots. An
    extension that changes training, such as a learning rate schedule, must run on all
    ranks.

    Args:
        extension: anything that ``Trainer.extend`` takes: an extension, a function
            decorated by :func:`chainer.training.make_extension`, or a plain function.
        comm: tells which rank this is; nothing is communicated.
        rank: the rank on which the extension runs.

    Returns:
        The extension for ``Trainer.extend``.

    Raises:
        TypeError: ``extension`` can't be called, or communicates, like a multi-node
            evaluator, so that all ranks must run it; ``comm`` is no communicator, or
            ``rank`` no integer.
        ValueError: there is no such rank.
    """
    comm = require_communicator(comm, "on_rank")
    if not callable(extension):
        raise TypeError(f"on_rank needs an extension, not {type(extension).__name__}")
    is_ours = any(
        each.__module__.startswith("chainermn_train.")
        for each in type(extension).__mro__
    )
    if is_ours or is_multi_node_evaluator(extension):
        raise TypeError(
            f"{type(extension).__name__} communicates, so it has to run on all ranks: give it to "
            "Trainer.extend as it is"
        )
    return OneRankExtension(
        extension, comm.rank == require_integer("rank", rank, 0, comm.size - 1)
    )


class OneRankExtension(AttributeProxy):
    """The extension ``actual`` on one rank; on other ranks an extension that does nothing."""

    _OWN = frozenset({"actual", "here"})
    _EVENTS = ("initialize", "finalize", "on_error", "serialize")

    def __init__(self, actual: Any, here: bool) -> None:
        super().__init__(actual)
        self.here = here  # whether it runs on this rank

    @property
    def __name__(self) -> str:
        return str(self.actual.__name__)

    def __call__(self, trainer: Any) -> Any:
        if self.here:
            return self.actual(trainer)
        return None

    def __getattr__(self, name: str) -> Any:
        # A function has no such method, or the attribute is None.
        if name in self._EVENTS and not (
            self.here and getattr(self.actual, name, None)
        ):
            return lambda *_: None
        return super().__getattr__(name)

"""What no step has used when a Trainer ends is used then, without anybody's asking."""

from __future__ import annotations

from functools import wraps
from typing import Any

from chainer.training import Trainer

from .multi_node_optimizer import MultiNodeOptimizer


class FlushingStop:
    """A Trainer's stop trigger; when it fires, its multi-node optimizers are flushed.

    So that comes before extensions are finalized: an error keeps checkpoints.
    """

    _stop: Any = None

    def __init__(self, stop: Any) -> None:
        self._stop = stop

    def __call__(self, trainer: Any) -> bool:
        if not self._stop(trainer):
            return False
        for optimizer in trainer.updater.get_all_optimizers().values():
            if isinstance(optimizer, MultiNodeOptimizer) and optimizer.keeps_gradients:
                optimizer.flush_when_all_have_left()
        return True

    def __getattr__(self, name: str) -> Any:
        # Snapshots have its state, progress bars its length.
        return getattr(self._stop, name)


def flush_after_training() -> None:
    """Let each Trainer that has run to its end flush its multi-node optimizers."""
    run = Trainer.run
    if hasattr(run, "_flushes"):
        return

    @wraps(run)
    def run_and_flush(self: Any, *args: Any, **kwargs: Any) -> None:
        stop, self.stop_trigger = self.stop_trigger, FlushingStop(self.stop_trigger)
        try:
            run(self, *args, **kwargs)
        finally:
            self.stop_trigger = stop

    run_and_flush._flushes = True  # type: ignore[attr-defined]
    Trainer.run = run_and_flush

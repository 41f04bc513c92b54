"""What no step has used when a Trainer ends is used then, without anybody's asking."""

from __future__ import annotations

from functools import wraps
from typing import Any

from chainer.training import Trainer

from .multi_node_optimizer import MultiNodeOptimizer


def flush_after_training() -> None:
    """Let each Trainer that has run to its end flush its multi-node optimizers."""
    run = Trainer.run
    if hasattr(run, "_flushes"):
        return

    @wraps(run)
    def run_and_flush(self: Any, *args: Any, **kwargs: Any) -> None:
        run(self, *args, **kwargs)
        for optimizer in self.updater.get_all_optimizers().values():
            if isinstance(optimizer, MultiNodeOptimizer) and optimizer.keeps_gradients:
                optimizer.flush_when_all_have_left()

    run_and_flush._flushes = True  # type: ignore[attr-defined]
    Trainer.run = run_and_flush

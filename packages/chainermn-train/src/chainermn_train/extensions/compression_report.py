"""The extension that reports how much gradients have lost by compression."""

from __future__ import annotations

import math
from typing import Any

import chainer
from chainer import training


class CompressionReport(training.Extension):
    """Reports the norm of the errors that ``compression=PowerSGD()`` has made on this rank.

    Each rank reports ``compression/error``, so that ``LogReport`` keeps it: the norm of
    what its gradients so far have lost, of all parameters of the trainer's optimizers.
    The next gradients make it good. It is 0 until gradients are compressed, then grows
    to some times a gradient's norm; if it goes on growing, use a larger ``rank``.

    Neither making nor calling it is collective. Calling it raises AttributeError if an
    optimizer isn't made by ``create_multi_node_optimizer``.
    """

    trigger = (1, "epoch")
    priority = training.PRIORITY_WRITER

    def __call__(self, trainer: Any) -> None:
        """Report on the errors after the last update (not collective)."""
        optimizers = trainer.updater.get_all_optimizers().values()
        errors = [each.compression_error for each in optimizers]
        chainer.report({"compression/error": math.hypot(*errors)})

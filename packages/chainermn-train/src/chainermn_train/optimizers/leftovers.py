"""The warning that a run ends with gradients that no step has used."""

from __future__ import annotations

import warnings

from chainermn_comm import CommunicatorBase

from .accumulation import Accumulation
from .exchanges import GradientExchange


def warn_of_leftovers(
    communicator: CommunicatorBase,
    accumulation: Accumulation,
    exchange: GradientExchange,
) -> None:
    """Warn on rank 0 if it has gradients that no step has used."""
    if communicator.rank == 0 and (exchange.pending or accumulation.num_accumulated):
        warnings.warn(
            "gradients are left that no step has used, as double_buffering and "
            "accumulate_steps leave them at the end: call the optimizer's flush() "
            "on all ranks after the last update",
            RuntimeWarning,
            stacklevel=4,
        )

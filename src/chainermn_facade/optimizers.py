"""Optimizers that average gradients over ranks."""

from chainermn_train.optimizers import *  # noqa: F403
from chainermn_train.optimizers import __all__ as __all__

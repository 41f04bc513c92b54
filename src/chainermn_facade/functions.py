"""Differentiable communication between ranks."""

from chainermn_modelparallel.functions import *  # noqa: F403
from chainermn_modelparallel.functions import __all__ as __all__

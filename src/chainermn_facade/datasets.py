"""Data sets that are spread over ranks."""

from chainermn_train.datasets import *  # noqa: F403
from chainermn_train.datasets import __all__ as __all__

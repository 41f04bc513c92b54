"""Iterators that several ranks share."""

from chainermn_train.iterators import *  # noqa: F403
from chainermn_train.iterators import __all__ as __all__

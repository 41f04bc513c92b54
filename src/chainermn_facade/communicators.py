"""Communicators and the errors they raise."""

from chainermn_comm import *  # noqa: F403
from chainermn_comm import __all__ as __all__

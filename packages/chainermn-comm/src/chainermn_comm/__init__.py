"""The communicators of ChainerMN: collective communication of arrays, objects and gradients."""

from _chainermn_startup import register as _register_finder

from .base import CommunicatorBase
from .catalogue import create_communicator
from .errors import CommunicationError, FinalizedError, PeerError, RankMismatchError
from .topology import Topology

__all__ = [
    "CommunicationError",
    "CommunicatorBase",
    "FinalizedError",
    "PeerError",
    "RankMismatchError",
    "Topology",
    "create_communicator",
]

_register_finder()  # again, for where `.pth` files don't run (--target, PYTHONPATH)

"""The communicators of ChainerMN: collective communication of arrays, objects and gradients."""

from _chainermn_startup import register as _register_finder

from .abort import install_if_forced as _install_if_forced
from .base import CommunicatorBase
from .catalogue import create_communicator
from .errors import CommunicationError, FinalizedError, PeerError, RankMismatchError
from .topology import Topology
from .waiting import patient_waits

__all__ = [
    "CommunicationError",
    "CommunicatorBase",
    "FinalizedError",
    "PeerError",
    "RankMismatchError",
    "Topology",
    "create_communicator",
    "patient_waits",
]

_register_finder()  # again, for where `.pth` files don't run (--target, PYTHONPATH)
_install_if_forced()  # the abort hook, where CHAINERMN_FORCE_ABORT_ON_EXCEPTION=1 asks for it

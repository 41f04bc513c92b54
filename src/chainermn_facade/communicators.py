"""Communicators and the errors they raise."""

from chainermn_comm import (
    CommunicationError,
    CommunicatorBase,
    FinalizedError,
    PeerError,
    RankMismatchError,
    Topology,
    create_communicator,
)

__all__ = [
    "CommunicationError",
    "CommunicatorBase",
    "FinalizedError",
    "PeerError",
    "RankMismatchError",
    "Topology",
    "create_communicator",
]

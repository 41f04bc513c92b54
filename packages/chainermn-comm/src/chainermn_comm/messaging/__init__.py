"""Messages of arrays and objects between ranks, and the handshake before collective operations."""

from ..errors import SharedFailure
from . import collectives, point_to_point
from .context import Context
from .handshake import Handshake, Signature
from .messages import ARRAY, OBJECT, SCALAR, TUPLE, WITH_METADATA, Message
from .messages import of_array as message_of_array
from .messages import of_object as message_of_object
from .messages import with_metadata as message_with_metadata
from .point_to_point import Peer
from .transfer import Buffer, start_exchange
from .transfer import bcast as bcast_buffer

__all__ = [
    "ARRAY",
    "OBJECT",
    "SCALAR",
    "TUPLE",
    "WITH_METADATA",
    "Buffer",
    "Context",
    "Handshake",
    "Message",
    "Peer",
    "SharedFailure",
    "Signature",
    "bcast_buffer",
    "collectives",
    "message_of_array",
    "message_of_object",
    "message_with_metadata",
    "point_to_point",
    "start_exchange",
]

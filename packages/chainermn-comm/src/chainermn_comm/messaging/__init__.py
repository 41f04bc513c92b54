"""Messages of arrays and objects between ranks, and the handshake before collective operations."""

from ..errors import SharedFailure as SharedFailure
from . import collectives as collectives
from . import point_to_point as point_to_point
from .context import Context as Context
from .handshake import Handshake as Handshake
from .messages import ARRAYS as ARRAYS
from .messages import ARRAYS_WITH_METADATA as ARRAYS_WITH_METADATA
from .messages import OBJECTS as OBJECTS
from .messages import Message as Message
from .messages import message_of_array as message_of_array
from .messages import message_of_object as message_of_object
from .messages import message_with_metadata as message_with_metadata
from .point_to_point import Peer as Peer
from .transfer import Buffer as Buffer
from .transfer import bcast_buffer as bcast_buffer
from .transfer import start_exchange as start_exchange

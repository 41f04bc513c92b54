"""Messages of arrays and objects between ranks, and the handshake before collective operations."""

from . import collectives as collectives
from . import messages as messages
from . import point_to_point as point_to_point
from .backend import Algorithm as Algorithm
from .backend import Backend as Backend
from .backend import MakeSum as MakeSum
from .backend import Parts as Parts
from .backend_choice import CAN_STAY as CAN_STAY
from .backend_choice import ON_GPU as ON_GPU
from .backend_choice import choose_backend as choose_backend
from .backend_choice import memory_of as memory_of
from .handshake import Handshake as Handshake
from .handshake import digest_of as digest_of
from .handshake import dtype_name as dtype_name
from .process_group import ProcessGroup as ProcessGroup
from .transfer import Buffer as Buffer
from .transfer import bcast_buffer as bcast_buffer
from .transfer import start_exchange as start_exchange

"""The kinds of exchange: how the gradients of one optimizer become means, and who steps."""

from .compressed_exchange import CompressedExchange
from .delayed_exchange import DelayedExchange
from .gradient_exchange import GradientExchange
from .narrowed_communicator import NarrowedCommunicator
from .overlapped_exchange import OverlappedExchange
from .power_sgd import PowerSGD
from .sharded_exchange import ShardedExchange

__all__ = [
    "CompressedExchange",
    "DelayedExchange",
    "GradientExchange",
    "NarrowedCommunicator",
    "OverlappedExchange",
    "PowerSGD",
    "ShardedExchange",
]

"""Iterators that several ranks share, and what their worker processes need under MPI."""

from .distributed_order_sampler import DistributedOrderSampler
from .epoch_positions import distributed_sampler as distributed_sampler
from .epoch_positions import epoch_positions as epoch_positions
from .epoch_positions import move_iterator as move_iterator
from .multi_node_iterator import MultiNodeIterator, create_multi_node_iterator
from .order_sampler import ResumableOrderSampler
from .synchronized_iterator import SynchronizedIterator, create_synchronized_iterator
from .worker_processes import use_forkserver

__all__ = [
    "DistributedOrderSampler",
    "MultiNodeIterator",
    "ResumableOrderSampler",
    "SynchronizedIterator",
    "create_multi_node_iterator",
    "create_synchronized_iterator",
    "use_forkserver",
]

"""Iterators that several ranks share, and what their worker processes need under MPI."""

from .distributed_order_sampler import DistributedOrderSampler
from .distributed_order_sampler import Place as Place
from .multi_node_iterator import MultiNodeIterator, create_multi_node_iterator
from .order_sampler import ResumableOrderSampler
from .places import place as place
from .places import places_of as places_of
from .places import shared_order as shared_order
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

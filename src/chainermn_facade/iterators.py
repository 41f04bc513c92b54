"""Iterators that several ranks share."""

from chainermn_train import (
    ResumableOrderSampler,
    create_multi_node_iterator,
    create_synchronized_iterator,
    use_forkserver,
)

__all__ = [
    "ResumableOrderSampler",
    "create_multi_node_iterator",
    "create_synchronized_iterator",
    "use_forkserver",
]

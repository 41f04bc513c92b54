"""Iterators that several ranks share."""

from chainermn_train import (
    create_multi_node_iterator,
    create_synchronized_iterator,
    use_forkserver,
)

__all__ = ["create_multi_node_iterator", "create_synchronized_iterator", "use_forkserver"]

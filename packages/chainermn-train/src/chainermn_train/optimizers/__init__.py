"""The multi-node optimizer: gradients, parameters and optimizer state over ranks."""

from .create import create_multi_node_optimizer
from .mark_synchronized import mark_synchronized_if_equal as mark_synchronized_if_equal
from .multi_node_optimizer import MultiNodeOptimizer

__all__ = ["MultiNodeOptimizer", "create_multi_node_optimizer"]

"""The multi-node optimizer: gradients, parameters and optimizer state over ranks."""

from .create import create_multi_node_optimizer
from .multi_node_optimizer import MultiNodeOptimizer, join

__all__ = ["MultiNodeOptimizer", "create_multi_node_optimizer", "join"]

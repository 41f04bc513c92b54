"""The multi-node optimizer: gradients, parameters and optimizer state over ranks."""

from .create import create_multi_node_optimizer
from .drift import is_same_on_all as is_same_on_all
from .gradient_set import group_of_rank as group_of_rank
from .join import join
from .multi_node_optimizer import MultiNodeOptimizer

__all__ = ["MultiNodeOptimizer", "create_multi_node_optimizer", "join"]

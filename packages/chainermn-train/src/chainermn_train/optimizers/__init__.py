"""The multi-node optimizer: gradients, parameters and optimizer state over ranks."""

from ..slots import is_same_on_all as is_same_on_all
from .create import create_multi_node_optimizer
from .gradient_clipping import MultiNodeGradientClipping
from .join import join
from .multi_node_optimizer import MultiNodeOptimizer

__all__ = [
    "MultiNodeGradientClipping",
    "MultiNodeOptimizer",
    "create_multi_node_optimizer",
    "join",
]

"""The multi-node optimizer: gradients, parameters and optimizer state over ranks."""

from .create import create_multi_node_optimizer
from .divided_model import common_ranks as common_ranks
from .exchanges import PowerSGD
from .gradient_clipping import MultiNodeGradientClipping
from .join import join
from .multi_node_optimizer import MultiNodeOptimizer

__all__ = [
    "MultiNodeGradientClipping",
    "MultiNodeOptimizer",
    "PowerSGD",
    "create_multi_node_optimizer",
    "join",
]

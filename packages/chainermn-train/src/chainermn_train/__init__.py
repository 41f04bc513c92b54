"""Data-parallel training: multi-node optimizer, data sets, iterators, checkpoints, extensions."""

# First: it sees to it that `import chainer` works where no start-up file ran.
import chainermn_comm  # noqa: F401

from .checkpoint import (
    MultiNodeCheckpointer,
    MultiNodeSnapshot,
    create_multi_node_checkpoint,
    create_multi_node_checkpointer,
    multi_node_snapshot,
)
from .datasets import create_empty_dataset, scatter_dataset, scatter_index
from .extensions import create_multi_node_evaluator
from .iterators import (
    MultiNodeIterator,
    ResumableOrderSampler,
    SynchronizedIterator,
    create_multi_node_iterator,
    create_synchronized_iterator,
    use_forkserver,
)
from .optimizers import MultiNodeOptimizer, create_multi_node_optimizer

__all__ = [
    "MultiNodeCheckpointer",
    "MultiNodeIterator",
    "MultiNodeOptimizer",
    "MultiNodeSnapshot",
    "ResumableOrderSampler",
    "SynchronizedIterator",
    "create_empty_dataset",
    "create_multi_node_checkpoint",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "create_multi_node_iterator",
    "create_multi_node_optimizer",
    "create_synchronized_iterator",
    "multi_node_snapshot",
    "scatter_dataset",
    "scatter_index",
    "use_forkserver",
]

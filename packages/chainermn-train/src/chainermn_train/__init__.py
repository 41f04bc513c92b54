"""ChainerMN's training wrappers: multi-node optimizer, evaluator and data sets."""

# First: it sees to it that `import chainer` works where no start-up file ran.
import chainermn_comm  # noqa: F401

from .checkpoint import create_multi_node_checkpoint, create_multi_node_checkpointer
from .datasets import create_empty_dataset, scatter_dataset, scatter_index
from .evaluator import create_multi_node_evaluator
from .iterators import create_multi_node_iterator
from .optimizer import create_multi_node_optimizer
from .order import ResumableOrderSampler
from .snapshot import multi_node_snapshot
from .synchronized_iterator import create_synchronized_iterator
from .workers import use_forkserver

__all__ = [
    "ResumableOrderSampler",
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

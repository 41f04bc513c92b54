"""What `import chainermn` gives: the names of the four packages under ChainerMN's own."""

from importlib.metadata import version

from chainermn_comm import CommunicatorBase, create_communicator
from chainermn_modelparallel import MultiNodeChainList
from chainermn_train import (
    DataSizeError,
    create_empty_dataset,
    create_multi_node_checkpoint,
    create_multi_node_checkpointer,
    create_multi_node_evaluator,
    create_multi_node_optimizer,
    scatter_dataset,
    scatter_index,
)

from . import (
    communicators,
    datasets,
    extensions,
    functions,
    global_except_hook,
    iterators,
    links,
    optimizers,
)

__version__ = version("chainermn")

__all__ = [
    "CommunicatorBase",
    "DataSizeError",
    "MultiNodeChainList",
    "__version__",
    "communicators",
    "create_communicator",
    "create_empty_dataset",
    "create_multi_node_checkpoint",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "create_multi_node_optimizer",
    "datasets",
    "extensions",
    "functions",
    "global_except_hook",
    "iterators",
    "links",
    "optimizers",
    "scatter_dataset",
    "scatter_index",
]

"""The module that `import chainermn` gives: the four packages' names under ChainerMN's names."""

from importlib import import_module
from importlib.metadata import version

from chainermn_comm import CommunicatorBase, create_communicator
from chainermn_modelparallel import MultiNodeChainList, share_loss_scale
from chainermn_train import (
    DataSizeError,
    MultiNodeGradientClipping,
    PowerSGD,
    create_empty_dataset,
    create_multi_node_checkpoint,
    create_multi_node_checkpointer,
    create_multi_node_evaluator,
    create_multi_node_optimizer,
    join,
    scatter_dataset,
    scatter_index,
)

from ._modules import importing
from ._table import ON_THE_FRONT_PAGE

__version__ = version("chainermn")

for _module in ON_THE_FRONT_PAGE:
    import_module(f"{__name__}.{_module}")
__getattr__ = importing(__name__, "evaluators", "nccl", "testing")

__all__ = [
    "CommunicatorBase",
    "DataSizeError",
    "MultiNodeChainList",
    "MultiNodeGradientClipping",
    "PowerSGD",
    "__version__",
    "create_communicator",
    "create_empty_dataset",
    "create_multi_node_checkpoint",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "create_multi_node_optimizer",
    "join",
    "scatter_dataset",
    "scatter_index",
    "share_loss_scale",
]
__all__ += ON_THE_FRONT_PAGE

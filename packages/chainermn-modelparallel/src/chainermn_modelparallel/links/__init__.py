"""Links whose parameters, batches or states span several ranks."""

from .batch_normalization import MultiNodeBatchNormalization
from .chain_list import MultiNodeChainList
from .mnbn_model import create_mnbn_model
from .n_step_rnn import create_multi_node_n_step_rnn
from .parallel_linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "MultiNodeBatchNormalization",
    "MultiNodeChainList",
    "RowParallelLinear",
    "create_mnbn_model",
    "create_multi_node_n_step_rnn",
]

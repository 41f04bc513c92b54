"""Links whose parts are on several ranks."""

from chainermn_modelparallel import (
    ColumnParallelLinear,
    MultiNodeBatchNormalization,
    MultiNodeChainList,
    RowParallelLinear,
    create_mnbn_model,
    create_multi_node_n_step_rnn,
)

__all__ = [
    "ColumnParallelLinear",
    "MultiNodeBatchNormalization",
    "MultiNodeChainList",
    "RowParallelLinear",
    "create_mnbn_model",
    "create_multi_node_n_step_rnn",
]

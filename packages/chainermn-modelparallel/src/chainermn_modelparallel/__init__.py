"""ChainerMN's model parallelism: differentiable communication between ranks."""

# First: it sees to it that `import chainer` works where no start-up file ran.
import chainermn_comm  # noqa: F401

from .functions import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    pseudo_connect,
    recv,
    reduce_scatter,
    scatter,
    send,
)
from .links import (
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
    "allgather",
    "allreduce",
    "alltoall",
    "bcast",
    "create_mnbn_model",
    "create_multi_node_n_step_rnn",
    "gather",
    "pseudo_connect",
    "recv",
    "reduce_scatter",
    "scatter",
    "send",
]

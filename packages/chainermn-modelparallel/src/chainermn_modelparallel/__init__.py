"""ChainerMN's model parallelism: differentiable communication between ranks."""

# First: it sees to it that `import chainer` works where no start-up file ran.
import chainermn_comm  # noqa: F401
from chainermn_modelparallel.batch_normalization import MultiNodeBatchNormalization
from chainermn_modelparallel.chain_list import MultiNodeChainList
from chainermn_modelparallel.collectives import (
    allgather,
    allreduce,
    alltoall,
    bcast,
    gather,
    reduce_scatter,
    scatter,
)
from chainermn_modelparallel.delegates import pseudo_connect
from chainermn_modelparallel.mnbn_model import create_mnbn_model
from chainermn_modelparallel.n_step_rnn import create_multi_node_n_step_rnn
from chainermn_modelparallel.parallel_linear import ColumnParallelLinear, RowParallelLinear
from chainermn_modelparallel.point_to_point import recv, send

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

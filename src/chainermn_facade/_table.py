"""What stands in the modules below `chainermn`: names of the four packages, where they ever lay.

ChainerMN 1.x and the `chainermn` in Chainer 5 to 7 had a file for each. `_modules.py`
makes them of this table; type checkers read stubs that `hatch_build.py` writes from it.
"""

_NAMED = "from chainermn_comm.named_communicators import "
_COMMUNICATOR_BASE = "from chainermn_comm import CommunicatorBase"
_EVALUATOR = "from chainermn_train import create_multi_node_evaluator"
_SCATTER = (
    "from chainermn_train.datasets import DataSizeError, get_epoch_trigger, "
    "get_n_iterations_for_one_epoch, scatter_dataset, scatter_index"
)

# The names in each module.
SOURCES = {
    "communicators": "from chainermn_comm import *",
    "communicators._base": _COMMUNICATOR_BASE,
    "communicators.communicator_base": _COMMUNICATOR_BASE,
    "communicators.dummy_communicator": _NAMED + "DummyCommunicator",
    "communicators.flat_communicator": _NAMED + "FlatCommunicator",
    "communicators.hierarchical_communicator": _NAMED + "HierarchicalCommunicator",
    "communicators.mpi_communicator_base": _NAMED + "MpiCommunicatorBase",
    "communicators.naive_communicator": _NAMED + "NaiveCommunicator",
    "communicators.non_cuda_aware_communicator": _NAMED + "NonCudaAwareCommunicator",
    "communicators.pure_nccl_communicator": _NAMED + "PureNcclCommunicator",
    "communicators.single_node_communicator": _NAMED + "SingleNodeCommunicator",
    "communicators.two_dimensional_communicator": _NAMED + "TwoDimensionalCommunicator",
    "datasets": "from chainermn_train.datasets import *",
    "datasets.empty_dataset": "from chainermn_train.datasets import create_empty_dataset",
    "datasets.scatter": _SCATTER,
    "datasets.scatter_dataset": _SCATTER,
    "evaluators": _EVALUATOR,
    "extensions": (
        "from chainermn_train.checkpoint import *\nfrom chainermn_train.extensions import *"
    ),
    "extensions._multi_node_snapshot": (
        "from chainermn_train.checkpoint import multi_node_snapshot"
    ),
    "extensions.allreduce_persistent": (
        "from chainermn_train.extensions import AllreducePersistent"
    ),
    "extensions.checkpoint": (
        "from chainermn_train.checkpoint import create_multi_node_checkpointer"
    ),
    "extensions.multi_node_early_stopping_trigger": (
        "from chainermn_train.extensions import MultiNodeEarlyStoppingTrigger"
    ),
    "extensions.multi_node_evaluator": (
        "from chainermn_train.extensions import GenericMultiNodeEvaluator, "
        "create_multi_node_evaluator"
    ),
    "extensions.observation_aggregator": (
        "from chainermn_train.extensions import ObservationAggregator"
    ),
    "functions": "from chainermn_modelparallel.functions import *",
    "functions.batch_normalization": (
        "from chainermn_modelparallel.functions import get_communication_backend"
    ),
    "functions.collective_communication": (
        "from chainermn_modelparallel.functions import allgather, alltoall, bcast, gather, scatter"
    ),
    "functions.point_to_point_communication": (
        "from chainermn_modelparallel.functions import recv, send"
    ),
    "functions.pseudo_connect": "from chainermn_modelparallel.functions import pseudo_connect",
    "global_except_hook": "from chainermn_comm.faults.abort import add_hook",
    "iterators": "from chainermn_train.iterators import *",
    "iterators.multi_node_iterator": (
        "from chainermn_train.iterators import create_multi_node_iterator"
    ),
    "iterators.synchronized_iterator": (
        "from chainermn_train.iterators import create_synchronized_iterator"
    ),
    "links": "from chainermn_modelparallel.links import *",
    "links.batch_normalization": (
        "from chainermn_modelparallel.links import MultiNodeBatchNormalization"
    ),
    "links.create_mnbn_model": "from chainermn_modelparallel.links import create_mnbn_model",
    "links.multi_node_chain_list": "from chainermn_modelparallel.links import MultiNodeChainList",
    "links.n_step_rnn": "from chainermn_modelparallel.links import create_multi_node_n_step_rnn",
    "optimizers": (
        "from chainermn_train.optimizers import *\n"
        "from chainermn_train.optimizers.legacy import _MultiNodeOptimizer"
    ),
    "testing": "from chainermn_train.testing import get_device",
    "testing.device": "from chainermn_train.testing import get_device",
}

# Private modules of older versions that programs import, and what to use instead.
LEFT_OUT = {
    "communicators._communication_utility": (
        "a communicator has what its functions made: rank, size, intra_rank, intra_size, "
        "inter_rank, inter_size, mpi_comm, split(comm.inter_rank, comm.rank) for the ranks of "
        "one node, bcast_obj for objects of any size, and multi_node_mean_grad for gradients"
    ),
    "communicators._memory_utility": (
        "multi_node_mean_grad packs and unpacks the gradients of a model by itself, and the "
        "methods of a communicator take arrays of NumPy and CuPy as they are"
    ),
}

# Each of these has one class, which is imported only when it is looked up, because the
# import starts MPI.
CLASSES = {
    path: source.removeprefix(_NAMED)
    for path, source in SOURCES.items()
    if source.startswith(_NAMED)
}

# The other modules are imported when they are used.
ON_THE_FRONT_PAGE = sorted(
    {path.partition(".")[0] for path in SOURCES} - {"evaluators", "testing"}
)

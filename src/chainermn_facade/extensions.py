"""Extensions of Chainer's Trainer that work over ranks."""

from chainermn_train import (
    create_multi_node_checkpoint,
    create_multi_node_checkpointer,
    create_multi_node_evaluator,
    multi_node_snapshot,
)
from chainermn_train.extensions import (
    AllreducePersistent,
    GenericMultiNodeEvaluator,
    MultiNodeEarlyStoppingTrigger,
    ObservationAggregator,
    ThroughputReport,
    on_rank,
)

__all__ = [
    "AllreducePersistent",
    "GenericMultiNodeEvaluator",
    "MultiNodeEarlyStoppingTrigger",
    "ObservationAggregator",
    "ThroughputReport",
    "create_multi_node_checkpoint",
    "create_multi_node_checkpointer",
    "create_multi_node_evaluator",
    "multi_node_snapshot",
    "on_rank",
]

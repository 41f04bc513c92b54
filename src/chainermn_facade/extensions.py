"""Extensions of Chainer's Trainer that work over ranks."""

from chainermn_train import create_multi_node_evaluator
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
    "create_multi_node_evaluator",
    "on_rank",
]

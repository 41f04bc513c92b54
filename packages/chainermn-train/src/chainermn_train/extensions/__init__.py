"""Extensions of Chainer's Trainer that work over ranks."""

from .allreduce_persistent import AllreducePersistent
from .compression_report import CompressionReport
from .early_stopping import MultiNodeEarlyStoppingTrigger
from .evaluator import create_multi_node_evaluator
from .generic_evaluator import GenericMultiNodeEvaluator
from .observation_aggregator import ObservationAggregator
from .one_rank import on_rank
from .throughput import ThroughputReport

__all__ = [
    "AllreducePersistent",
    "CompressionReport",
    "GenericMultiNodeEvaluator",
    "MultiNodeEarlyStoppingTrigger",
    "ObservationAggregator",
    "ThroughputReport",
    "create_multi_node_evaluator",
    "on_rank",
]

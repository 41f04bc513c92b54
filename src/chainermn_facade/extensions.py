"""Extensions of Chainer's Trainer that work over ranks."""

from chainermn_train import create_multi_node_evaluator

__all__ = ["create_multi_node_evaluator"]

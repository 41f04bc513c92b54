"""Optimizers that average gradients over ranks."""

from chainermn_train import create_multi_node_optimizer

__all__ = ["create_multi_node_optimizer"]

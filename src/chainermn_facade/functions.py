"""Differentiable communication between ranks."""

from chainermn_modelparallel import pseudo_connect, recv, send

__all__ = ["pseudo_connect", "recv", "send"]

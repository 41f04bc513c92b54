"""ChainerMN's model parallelism: differentiable communication between ranks."""

from chainermn_modelparallel.delegates import pseudo_connect
from chainermn_modelparallel.point_to_point import recv, send

__all__ = ["pseudo_connect", "recv", "send"]

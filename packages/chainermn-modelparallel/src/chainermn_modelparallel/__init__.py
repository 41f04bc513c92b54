"""ChainerMN's model parallelism: differentiable communication between ranks."""

# First: it sees to it that `import chainer` works where no start-up file ran.
import chainermn_comm  # noqa: F401
from chainermn_modelparallel.delegates import pseudo_connect
from chainermn_modelparallel.point_to_point import recv, send

__all__ = ["pseudo_connect", "recv", "send"]

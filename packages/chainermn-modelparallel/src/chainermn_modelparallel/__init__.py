"""ChainerMN's model parallelism: differentiable communication between ranks."""

# First, because it repairs `import chainer` if no start-up file has run.
import chainermn_comm  # noqa: F401

from . import functions, links
from .functions import *  # noqa: F403
from .links import *  # noqa: F403
from .loss_scaling import share_loss_scale

__all__ = [*functions.__all__, *links.__all__, "share_loss_scale"]

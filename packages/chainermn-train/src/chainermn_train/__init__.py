"""ChainerMN's training wrappers: multi-node optimizer, evaluator and data sets."""

# First, because it repairs `import chainer` if no start-up file has run.
import chainermn_comm  # noqa: F401

from . import checkpoint, datasets, iterators, optimizers
from .checkpoint import *  # noqa: F403
from .datasets import *  # noqa: F403
from .extensions import create_multi_node_evaluator
from .iterators import *  # noqa: F403
from .optimizers import *  # noqa: F403

__all__ = checkpoint.__all__ + datasets.__all__ + iterators.__all__ + optimizers.__all__
__all__ += ["create_multi_node_evaluator"]

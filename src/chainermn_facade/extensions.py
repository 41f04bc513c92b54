"""Extensions of Chainer's Trainer that work over ranks."""

from chainermn_train import checkpoint as _checkpoint
from chainermn_train import extensions as _extensions
from chainermn_train.checkpoint import *  # noqa: F403
from chainermn_train.extensions import *  # noqa: F403

__all__ = _checkpoint.__all__ + _extensions.__all__

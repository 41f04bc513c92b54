"""Links whose parts are on several ranks."""

from chainermn_modelparallel.links import *  # noqa: F403
from chainermn_modelparallel.links import __all__ as __all__

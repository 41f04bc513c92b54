"""Arrays in host memory: their sums and means over ranks, and the backend that moves them, too."""

from ..layout import Operand
from ..messaging import Algorithm
from .bucketed import Bucketed
from .factories import FACTORIES as FACTORIES
from .host_backend import BACKENDS as BACKENDS
from .host_backend import HostBackend
from .verbs import reduce_arrays as reduce_arrays

# What users may use; the other names are for the folders above.
__all__ = ["Algorithm", "Bucketed", "HostBackend", "Operand"]

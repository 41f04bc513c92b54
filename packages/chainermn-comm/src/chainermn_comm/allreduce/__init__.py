"""Sums and means of arrays over ranks in host memory."""

from ..arithmetic import Operand
from ..messaging import Algorithm
from .bucketed import Bucketed
from .factories import FACTORIES as FACTORIES
from .host_backend import HostBackend
from .verbs import reduce_arrays as reduce_arrays

# What users may use; the other names are for the folders above.
__all__ = ["Algorithm", "Bucketed", "HostBackend", "Operand"]

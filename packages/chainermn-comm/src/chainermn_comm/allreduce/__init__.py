"""Sums and means of arrays over ranks in host memory."""

from .algorithm import Algorithm, Operand
from .algorithm import Factory as Factory
from .bucketed import Bucketed
from .factories import FACTORIES as FACTORIES
from .factories import AlgorithmCache as AlgorithmCache
from .verbs import reduce_arrays as reduce_arrays

# What users may use; the other names are for the folders above.
__all__ = ["Algorithm", "Bucketed", "Operand"]

"""Sums and means of flat arrays over ranks in host memory: the algorithms, and their arithmetic."""

from .algorithm import Algorithm
from .algorithm import Bucket as Bucket
from .algorithm import Factory as Factory
from .bucketed import Bucketed
from .chunks import Chunk as Chunk
from .chunks import plan_chunks as plan_chunks
from .factories import FACTORIES as FACTORIES
from .factories import AlgorithmCache as AlgorithmCache
from .pairwise import PairwiseAllreduce as PairwiseAllreduce
from .summation import overflow_errstate as overflow_errstate
from .user_arrays import reduce_arrays as reduce_arrays

# What users may use; the other names are for the folders above.
__all__ = ["Algorithm", "Bucketed"]

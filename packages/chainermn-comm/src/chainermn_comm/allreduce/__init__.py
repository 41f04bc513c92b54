"""Sums and means of flat arrays over ranks in host memory: the algorithms, and their arithmetic."""

from .algorithm import Algorithm, Factory, NoOp
from .bucketed import Bucketed
from .chunks import Chunk, plan_chunks
from .factories import FACTORIES, AlgorithmCache
from .pairwise import Allreduce, PairwiseAllreduce
from .summation import overflow_errstate
from .user_arrays import reduce_arrays

__all__ = [
    "FACTORIES",
    "Algorithm",
    "AlgorithmCache",
    "Allreduce",
    "Bucketed",
    "Chunk",
    "Factory",
    "NoOp",
    "PairwiseAllreduce",
    "overflow_errstate",
    "plan_chunks",
    "reduce_arrays",
]

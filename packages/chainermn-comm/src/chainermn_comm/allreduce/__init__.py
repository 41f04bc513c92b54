"""Sums and means of flat arrays over ranks in host memory: the algorithms, and their arithmetic."""

from .algorithm import Algorithm, Operand
from .algorithm import Factory as Factory
from .algorithm import NextOperand as NextOperand
from .bucketed import Bucketed
from .casts import BLOCK_ELEMENTS as BLOCK_ELEMENTS
from .chunks import Chunk as Chunk
from .chunks import plan_chunks as plan_chunks
from .factories import FACTORIES as FACTORIES
from .factories import AlgorithmCache as AlgorithmCache
from .pairwise import shard_slice as shard_slice
from .pairwise import start_allgather as start_allgather
from .pairwise import start_reduce_scatter as start_reduce_scatter
from .summation import overflow_errstate as overflow_errstate
from .summation import sum_rows as sum_rows
from .user_arrays import reduce_arrays as reduce_arrays
from .user_arrays import reduce_scatter_arrays as reduce_scatter_arrays

# What users may use; the other names are for the folders above.
__all__ = ["Algorithm", "Bucketed", "Operand"]

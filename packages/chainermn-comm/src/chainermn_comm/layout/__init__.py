"""Arrays that are summed together, and their division into chunks and shards."""

from .chunks import CACHE_LINE as CACHE_LINE
from .chunks import Chunk as Chunk
from .chunks import plan_chunks as plan_chunks
from .chunks import shard_slice as shard_slice
from .operand import Arrays as Arrays
from .operand import Dtypes as Dtypes
from .operand import Operand as Operand

"""Sums and means over ranks of arrays in host memory, and the backend for such arrays."""

from ..layout import Operand
from ..messaging import Algorithm
from .chunked_sum import ChunkedSum
from .factories import gpus_only as gpus_only
from .factories import multi_leader as multi_leader
from .factories import no_op as no_op
from .factories import packed as packed
from .factories import per_tensor as per_tensor
from .factories import rank_ordered as rank_ordered
from .factories import single_leader as single_leader
from .host_backend import HostBackend
from .verbs import mean_into as mean_into
from .verbs import reduce_arrays as reduce_arrays

# These names are for users, and all others for the folders above.
__all__ = ["Algorithm", "ChunkedSum", "HostBackend", "Operand"]

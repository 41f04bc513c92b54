"""Everything that uses CuPy: arrays on GPUs, kernels, NCCL, and copies to host memory.

Importing the folder imports neither CuPy nor MPI.
"""

from . import devices as devices
from . import kernels as kernels
from . import nccl as nccl
from . import staging as staging
from .nccl import OLDEST as OLDEST_NCCL
from .nccl import NcclCommunicator as NcclCommunicator

# `chainermn doctor` reads this name; the other names are for the folders above.
__all__ = ["OLDEST_NCCL"]

"""NCCL's functions and constants, as CuPy has them, and whether they are available."""

try:
    from cupy.cuda.nccl import *  # noqa: F403

    _available = True
except ImportError:
    _available = False

"""Sums and moves of arrays on GPUs: by NCCL, and through page-locked host memory."""

from .nccl_backend import NcclBackend as NcclBackend
from .staged_sum import sum_through_host as sum_through_host

"""What a rank takes of its machine: threads of the BLAS, and cores while it waits for messages."""

from .blas_threads import blas_payload, limit_blas_threads
from .progress import barrier, patient_waits, wait_all

__all__ = ["barrier", "blas_payload", "limit_blas_threads", "patient_waits", "wait_all"]

"""What a rank takes of its machine: threads of the BLAS, and cores while it waits for messages."""

from .blas_threads import blas_payload, limit_blas_threads
from .progress import are_done, barrier, patient_waits, wait_all, wait_any, wait_until

__all__ = [
    "are_done",
    "barrier",
    "blas_payload",
    "limit_blas_threads",
    "patient_waits",
    "wait_all",
    "wait_any",
    "wait_until",
]

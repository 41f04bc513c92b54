"""A rank's use of its machine: threads of the BLAS, and cores while it waits for messages."""

from .blas_threads import limit_blas_threads as limit_blas_threads
from .progress import barrier as barrier
from .progress import patient_waits as patient_waits
from .progress import wait_all as wait_all
from .progress import wait_until as wait_until

"""Threads of the BLAS, and progress of MPI while a rank waits."""

"""Benchmarks: check communicators' values, time them, and show tables and a plot.

Nothing is re-exported, since most modules load MPI. Other folders may use `operations`, `timing`,
`values` (all for the doctor), `sizes`, `start`, `rank`, `text` and `plot`.
"""

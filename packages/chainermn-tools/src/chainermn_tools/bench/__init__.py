"""Benchmarks: check communicators' values, time them, and show tables and a plot.

Nothing is re-exported, since most modules load NumPy and `chainermn_comm`. Other
folders may use `operations`, `timing`, `values` (all for the doctor), `worker`, `text`
and `plot`.
"""

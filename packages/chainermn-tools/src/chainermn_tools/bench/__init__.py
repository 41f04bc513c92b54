"""Benchmarks: check communicators' values, time them, and show one table and one plot.

Nothing is re-exported, since most modules load NumPy and `chainermn_comm`. Other
folders may use `runner`, `table` and `plot`.
"""

"""Sums and means of flat arrays over ranks in host memory: the algorithms and how one is chosen."""

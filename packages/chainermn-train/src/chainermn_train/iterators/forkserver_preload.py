"""Imported only by the server that worker processes are forked from: not each imports Chainer."""

import os

import numpy as np

from . import worker_processes  # noqa: F401  (it imports Chainer)

# Otherwise all workers would draw the same numbers, those that come next in the
# server's generator. Python's own generator is seeded anew by Python.
os.register_at_fork(after_in_child=np.random.seed)

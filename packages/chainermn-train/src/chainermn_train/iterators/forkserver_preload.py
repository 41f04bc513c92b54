"""Imports for the server that forks worker processes, so that workers needn't import them."""

import os

import numpy as np

from . import worker_processes  # noqa: F401  (it imports Chainer)

# Without this, all workers would draw the same numbers, which come next in the server's
# generator. Python seeds its own generator anew.
os.register_at_fork(after_in_child=np.random.seed)

# ruff: noqa: F401
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn_comm
import chainermn_modelparallel

comm = chainermn_comm.create_communicator()
first_half, second_half = L.Linear(4, 3), L.Linear(3, 2)
x, t = np.ones((5, 4), np.float32), np.zeros(5, np.int32)

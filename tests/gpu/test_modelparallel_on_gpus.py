"""Model parallelism on real devices: what travels stays on a device, and Chainer takes it there.

Not on the double, which does no arithmetic.
"""

from __future__ import annotations

import chainer.functions as F
import numpy as np
import pytest
from chainer import Variable
from numpy.testing import assert_array_equal

from chainermn_comm import create_communicator
from chainermn_modelparallel import pseudo_connect, recv, send

pytestmark = [pytest.mark.gpu, pytest.mark.world, pytest.mark.sizes(2)]


@pytest.fixture
def comm(device):
    """Its rank's device is the current one."""
    with create_communicator("naive") as communicator:
        yield communicator


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_there_and_back(comm, dtype):
    import cupy

    if comm.rank == 0:
        x = Variable(cupy.full(3, 2, dtype))
        hosts = Variable(np.zeros(2, "f"))
        y = recv(comm, 1, delegate_variable=send(x, comm, 1))
        pseudo_connect(hosts, F.sum(y)).backward()
        assert x.grad.dtype == dtype
        assert_array_equal(x.grad.get(), [12, 12, 12])
        assert_array_equal(hosts.grad, [0, 0])
    else:
        y = recv(comm, 0, delegate_variable=Variable(np.zeros(0, "f")))
        assert isinstance(y.array, cupy.ndarray)
        send(y**3, comm, 0).backward()

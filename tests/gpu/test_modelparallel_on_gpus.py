"""Model parallelism on real devices: what travels stays on a device, and Chainer takes it there.

Not on the double, which does no arithmetic.
"""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Variable

from chainermn_comm import create_communicator
from chainermn_modelparallel import MultiNodeChainList, pseudo_connect, recv, send

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
        x, hosts = Variable(cupy.full(3, 2, dtype)), Variable(np.zeros(2, "f"))
        y = recv(comm, 1, delegate_variable=send(x, comm, 1))
        pseudo_connect(hosts, F.sum(y)).backward()
        assert x.grad.dtype == dtype
        np.testing.assert_array_equal(x.grad.get(), [12, 12, 12])
        np.testing.assert_array_equal(hosts.grad, [0, 0])
    else:
        y = recv(comm, 0, delegate_variable=Variable(np.zeros(0, "f")))
        assert isinstance(y.array, cupy.ndarray)
        send(y**3, comm, 0).backward()


def test_a_chain_list_goes_to_and_fro(comm):
    rng = np.random.default_rng(0)
    links = [
        L.Linear(4, 4, initialW=rng.standard_normal((4, 4)).astype("f"))
        for _ in range(3)
    ]
    x = rng.standard_normal((5, 4)).astype("f")
    alone = chainer.Sequential(*links).copy(mode="copy")
    alone.cleargrads()
    F.sum(alone(x) ** 2).backward()

    model = MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(links[0], None, 1)
        model.add_link(links[2], 1, None)
    else:
        model.add_link(links[1], 0, 0)
    count = chainer.backends.cuda.cupy.cuda.runtime.getDeviceCount()
    model.to_device(f"@cupy:{comm.rank % count}")
    model.cleargrads()
    y = model(model.xp.asarray(x)) if comm.rank == 0 else model()
    (F.sum(y**2) if comm.rank == 0 else y).backward()
    for index in (0, 2) if comm.rank == 0 else (1,):
        got, expected = links[index].W.grad.get(), alone[index].W.grad
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_the_second_derivative_crosses_ranks(comm):
    import cupy

    if comm.rank == 0:
        x = Variable(cupy.ones(3, "f"))
        (gx,) = chainer.grad([send(x, comm, 1)], [x], enable_double_backprop=True)
        F.sum(gx**2).backward()
        # Of (3 x^2)^2.
        np.testing.assert_allclose(x.grad.get(), [36, 36, 36], rtol=1e-5)
    else:
        hold = Variable(np.zeros(0, "f"))
        y = recv(comm, 0, delegate_variable=hold)
        (again,) = chainer.grad([F.sum(y**3)], [hold], enable_double_backprop=True)
        again.backward()

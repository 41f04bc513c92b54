"""Differentiable communication: outputs and gradients."""

from __future__ import annotations

import chainer.functions as F
import numpy as np
from chainer import Variable, no_backprop_mode

from .table import case, each, outcome


def variable(rank, shape=(2,), dtype=np.float32):
    return Variable(np.full(shape, rank + 1, dtype))


@each("float32", "float64", "float16")
def send_and_recv(chainermn, comm, dtype):
    if comm.rank == 0:
        x = variable(0, dtype=dtype)
        sent = chainermn.functions.send(x, comm, 1, tag=3)
        sent.backward()
        return sent, x.grad
    y = chainermn.functions.recv(comm, 0, tag=3)
    F.sum(y * 3).backward()
    return y, y.requires_grad


@case
def send_a_tuple(chainermn, comm):
    if comm.rank == 0:
        xs = variable(0), variable(1, (3,))
        sent = chainermn.functions.send(xs, comm, 1)
        sent.backward()
        return sent, [x.grad for x in xs]
    ys = chainermn.functions.recv(comm, 0)
    (F.sum(ys[0]) + F.sum(ys[1] * 2)).backward()
    return ys


@each(False, True)
def force_tuple(chainermn, comm, force):
    if comm.rank == 0:
        return chainermn.functions.send(variable(0), comm, 1)
    return chainermn.functions.recv(comm, 0, force_tuple=force)


@case
def send_an_array(chainermn, comm):
    if comm.rank == 0:
        return chainermn.functions.send(np.ones(2, np.float32), comm, 1)
    return chainermn.functions.recv(comm, 0)


@case
def send_two_by_tag(chainermn, comm):
    if comm.rank == 0:
        sent = [chainermn.functions.send(variable(n), comm, 1, tag=n) for n in range(2)]
        return [one.shape for one in sent]
    first = chainermn.functions.recv(comm, 0, tag=0)
    return first, chainermn.functions.recv(comm, 0, delegate_variable=first, tag=1)


@case
def recv_with_a_delegate(chainermn, comm):
    """There and back."""
    functions = chainermn.functions
    if comm.rank == 0:
        x = variable(0)
        sent = functions.send(x, comm, 1)
        y = functions.recv(comm, 1, delegate_variable=sent)
        F.sum(y).backward()
        return y, x.grad
    x = functions.recv(comm, 0)
    sent = functions.send(x * 5, comm, 0)
    sent.backward()
    return sent, x.grad


@case
def recv_within_no_backprop_mode(chainermn, comm):
    with no_backprop_mode():
        if comm.rank == 0:
            return chainermn.functions.send(variable(0), comm, 1)
        return chainermn.functions.recv(comm, 0)


# -- pseudo_connect


def one(y):
    """The variable, which Chainer 7's puts into a tuple."""
    if isinstance(y, tuple):
        return y[0]
    return y


@case
def pseudo_connect(chainermn, comm):
    delegate = Variable(np.zeros(0, np.float32))
    x = variable(comm.rank)
    y = one(chainermn.functions.pseudo_connect(delegate, x))
    F.sum(y * 2).backward()
    return y, x.grad, delegate.grad


@case
def pseudo_connect_gives(chainermn, comm):
    delegate = Variable(np.zeros(0, np.float32))
    return type(chainermn.functions.pseudo_connect(delegate, variable(comm.rank)))


@case
def pseudo_connect_unpacks_a_scalar(chainermn, comm):
    """As scripts for Chainer 7 do with a loss."""
    delegate = Variable(np.zeros(0, np.float32))
    x = variable(comm.rank)
    (loss,) = chainermn.functions.pseudo_connect(delegate, F.sum(x * 2))
    loss.backward()
    return loss, x.grad, chainermn.functions.pseudo_connect(delegate, F.sum(x))[0]


@case
def pseudo_connect_several(chainermn, comm):
    delegate = Variable(np.zeros(0, np.float32))
    xs = variable(comm.rank), variable(comm.rank, (3,))
    ys = chainermn.functions.pseudo_connect(delegate, *xs)
    (F.sum(ys[0]) + F.sum(ys[1] * 2)).backward()
    return ys, [x.grad for x in xs]


@case
def pseudo_connect_nothing(chainermn, comm):
    delegate = Variable(np.zeros(0, np.float32))
    return chainermn.functions.pseudo_connect(delegate)


@case
def pseudo_connect_to_none(chainermn, comm):
    x = variable(comm.rank)
    y = one(chainermn.functions.pseudo_connect(None, x))
    return y, y is x


@case
def pseudo_connect_arrays(chainermn, comm):
    delegate = Variable(np.zeros(0, np.float32))
    return one(chainermn.functions.pseudo_connect(delegate, np.ones(2, np.float32)))


@each(float16=np.float16, float64=np.float64)
def pseudo_connect_dtypes(chainermn, comm, dtype):
    delegate = Variable(np.zeros(0, np.float32))
    x = variable(comm.rank, dtype=dtype)
    y = one(chainermn.functions.pseudo_connect(delegate, x))
    F.sum(y).backward()
    return y, x.grad


# -- collectives


def differentiated(ys, xs):
    """Outputs and gradients; output number n has the factor rank + n + 1."""
    outputs = ys
    if isinstance(ys, Variable):
        outputs = [ys]
    sum(F.sum(y) * (n + 2) for n, y in enumerate(outputs)).backward()
    return ys, [x.grad for x in xs]


@case
def allgather(chainermn, comm):
    x = variable(comm.rank)
    return differentiated(chainermn.functions.allgather(comm, x), [x])


@case
def alltoall(chainermn, comm):
    xs = [variable(10 * comm.rank + n) for n in range(2)]
    return differentiated(chainermn.functions.alltoall(comm, xs), xs)


@each(0, 1)
def bcast(chainermn, comm, root):
    if comm.rank == root:
        x = variable(comm.rank)
        return differentiated(chainermn.functions.bcast(comm, x, root), [x])
    return differentiated(chainermn.functions.bcast(comm, None, root), [])


@case
def bcast_where_others_have_a_variable(chainermn, comm):
    x = variable(comm.rank)
    return differentiated(chainermn.functions.bcast(comm, x), [x])


@each(0, 1)
def gather(chainermn, comm, root):
    x = variable(comm.rank)
    y = chainermn.functions.gather(comm, x, root)
    if comm.rank == root:
        return differentiated(y, [x])
    y.backward()
    return y, x.grad


@each(0, 1)
def scatter(chainermn, comm, root):
    if comm.rank == root:
        xs = [variable(n) for n in range(2)]
        return differentiated(chainermn.functions.scatter(comm, xs, root), xs)
    return differentiated(chainermn.functions.scatter(comm, None, root), [])


@case
def scatter_of_an_array(chainermn, comm):
    x = np.arange(4, dtype=np.float32).reshape(2, 2)

    def call():
        return chainermn.functions.scatter(comm, Variable(x))

    return outcome(call)


@case
def collectives_of_arrays(chainermn, comm):
    array = np.full(2, comm.rank, np.float32)
    return chainermn.functions.allgather(comm, array), chainermn.functions.bcast(
        comm, array
    )


@each("float16", "float64")
def collectives_of_dtype(chainermn, comm, dtype):
    x = variable(comm.rank, dtype=dtype)
    return differentiated(chainermn.functions.allgather(comm, x), [x])

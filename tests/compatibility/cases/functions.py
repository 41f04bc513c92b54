"""Differentiable communication: outputs and gradients."""

from __future__ import annotations

import chainer
import chainer.functions as F
import numpy as np

from .table import case, each, outcome


def variable(rank, shape=(2,), dtype=np.float32):
    return chainer.Variable(np.full(shape, rank + 1, dtype))


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
def send_and_recv_by_keywords(chainermn, comm):
    if comm.rank == 0:
        return chainermn.functions.send(x=variable(0), communicator=comm, rank=1, tag=0)
    return chainermn.functions.recv(communicator=comm, rank=0, delegate_variable=None)


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


@case
def send_a_tuple_of_one(chainermn, comm):
    if comm.rank == 0:
        return chainermn.functions.send((variable(0),), comm, 1)
    return chainermn.functions.recv(comm, 0)


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
def send_to_itself(chainermn, comm):
    return chainermn.functions.send(variable(0), comm, comm.rank)


@case
def recv_of_itself(chainermn, comm):
    return chainermn.functions.recv(comm, comm.rank)


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
    with chainer.no_backprop_mode():
        if comm.rank == 0:
            return chainermn.functions.send(variable(0), comm, 1)
        return chainermn.functions.recv(comm, 0)


# -- pseudo_connect


def one(y):
    """The variable, which Chainer 7's puts into a tuple."""
    return y[0] if isinstance(y, tuple) else y


@case
def pseudo_connect(chainermn, comm):
    delegate = chainer.Variable(np.zeros(0, np.float32))
    x = variable(comm.rank)
    y = one(chainermn.functions.pseudo_connect(delegate, x))
    F.sum(y * 2).backward()
    return y, x.grad, delegate.grad


@case
def pseudo_connect_gives(chainermn, comm):
    delegate = chainer.Variable(np.zeros(0, np.float32))
    return type(chainermn.functions.pseudo_connect(delegate, variable(comm.rank)))


@case
def pseudo_connect_unpacks_a_scalar(chainermn, comm):
    """As scripts for Chainer 7 do with a loss."""
    delegate = chainer.Variable(np.zeros(0, np.float32))
    x = variable(comm.rank)
    (loss,) = chainermn.functions.pseudo_connect(delegate, F.sum(x * 2))
    loss.backward()
    return loss, x.grad, chainermn.functions.pseudo_connect(delegate, F.sum(x))[0]


@case
def pseudo_connect_several(chainermn, comm):
    delegate = chainer.Variable(np.zeros(0, np.float32))
    xs = variable(comm.rank), variable(comm.rank, (3,))
    ys = chainermn.functions.pseudo_connect(delegate, *xs)
    (F.sum(ys[0]) + F.sum(ys[1] * 2)).backward()
    return ys, [x.grad for x in xs]


@case
def pseudo_connect_nothing(chainermn, comm):
    delegate = chainer.Variable(np.zeros(0, np.float32))
    return chainermn.functions.pseudo_connect(delegate)


@case
def pseudo_connect_to_none(chainermn, comm):
    x = variable(comm.rank)
    y = one(chainermn.functions.pseudo_connect(None, x))
    return y, y is x


@case
def pseudo_connect_several_to_none(chainermn, comm):
    return chainermn.functions.pseudo_connect(None, variable(0), variable(1))


@case
def pseudo_connect_nothing_to_none(chainermn, comm):
    return chainermn.functions.pseudo_connect(None)


@case
def pseudo_connect_arrays(chainermn, comm):
    delegate = chainer.Variable(np.zeros(0, np.float32))
    return one(chainermn.functions.pseudo_connect(delegate, np.ones(2, np.float32)))


@each(float16=np.float16, float64=np.float64)
def pseudo_connect_dtypes(chainermn, comm, dtype):
    delegate = chainer.Variable(np.zeros(0, np.float32))
    x = variable(comm.rank, dtype=dtype)
    y = one(chainermn.functions.pseudo_connect(delegate, x))
    F.sum(y).backward()
    return y, x.grad


# -- collectives


def differentiated(ys, xs):
    """Outputs and gradients; output number n has the factor rank + n + 1."""
    outputs = ys if isinstance(ys, list | tuple) else [ys]
    sum(F.sum(y) * (n + 2) for n, y in enumerate(outputs)).backward()
    return ys, [x.grad for x in xs]


@case
def allgather(chainermn, comm):
    x = variable(comm.rank)
    return differentiated(chainermn.functions.allgather(comm, x), [x])


@case
def allgather_shapes_that_differ(chainermn, comm):
    x = variable(comm.rank, (comm.rank + 1,))
    return differentiated(chainermn.functions.allgather(comm, x), [x])


@case
def alltoall(chainermn, comm):
    xs = [variable(10 * comm.rank + n) for n in range(2)]
    return differentiated(chainermn.functions.alltoall(comm, xs), xs)


@case
def alltoall_of_a_tuple(chainermn, comm):
    xs = tuple(variable(10 * comm.rank + n) for n in range(2))
    return differentiated(chainermn.functions.alltoall(comm, xs), xs)


@each(1, 3)
def alltoall_of_another_number(chainermn, comm, count):
    return chainermn.functions.alltoall(comm, [variable(0)] * count)


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
def scatter_of_a_tuple(chainermn, comm):
    xs = tuple(variable(n) for n in range(2)) if comm.rank == 0 else None
    return chainermn.functions.scatter(comm, xs)


@case
def scatter_of_an_array(chainermn, comm):
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    return outcome(lambda: chainermn.functions.scatter(comm, chainer.Variable(x)))


@case
def collectives_by_keywords(chainermn, comm):
    functions = chainermn.functions
    return [
        functions.allgather(comm=comm, x=variable(comm.rank)),
        functions.alltoall(comm=comm, xs=[variable(n) for n in range(2)]),
        functions.bcast(comm=comm, x=variable(comm.rank), root=0),
        functions.gather(comm=comm, x=variable(comm.rank), root=0),
    ]


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

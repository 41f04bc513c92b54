"""Links whose parts are on several ranks."""

from __future__ import annotations

import importlib

import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import Chain, ChainList, Sequential, Variable, using_config

from .models import grads, inputs, linear, state
from .table import case, each, outcome


def normalization(chainermn, comm, size=3, **how):
    return chainermn.links.MultiNodeBatchNormalization(size, comm, **how)


def trained(link, x):
    """Its outputs, gradients, parameters and persistents after a forward and a backward."""
    x = Variable(x)
    y = link(x)
    link.cleargrads()
    F.sum(y * np.arange(y.size, dtype=y.dtype).reshape(y.shape)).backward()
    return y, x.grad, grads(link), state(link)


def plain(rank):
    return (np.sin(np.arange(12, dtype=np.float32)) * (rank + 1)).reshape(4, 3)


@case
def batch_normalization(chainermn, comm):
    return trained(normalization(chainermn, comm), plain(comm.rank))


@case
def batch_normalization_when_testing(chainermn, comm):
    link = normalization(chainermn, comm)
    link(plain(comm.rank))
    with using_config("train", False):
        return link(plain(0))


@each(
    decay={"decay": 0.5},
    eps={"eps": 0.5},
    no_gamma={"use_gamma": False},
    no_beta={"use_beta": False},
    gamma={"initial_gamma": 3},
    beta={"initial_beta": 3},
    mpi={"communication_backend": "mpi"},
    nccl={"communication_backend": "nccl"},
    unknown={"communication_backend": "unknown"},
)
def batch_normalization_with(chainermn, comm, how):
    return trained(normalization(chainermn, comm, **how), plain(comm.rank))


@each(float16=np.float16, float32=np.float32, float64=np.float64, none=None)
def batch_normalization_dtype(chainermn, comm, dtype):
    return state(normalization(chainermn, comm, dtype=dtype))


@each(float16=np.float16, float64=np.float64)
def batch_normalization_of_inputs(chainermn, comm, dtype):
    link = normalization(chainermn, comm, dtype=dtype)
    return trained(link, plain(comm.rank).astype(dtype))


@case
def batch_normalization_of_images(chainermn, comm):
    x = np.sin(np.arange(2 * 3 * 2 * 2, dtype=np.float32)).reshape(2, 3, 2, 2)
    return trained(normalization(chainermn, comm), x * (comm.rank + 1))


@case
def batch_normalization_with_a_tuple_size(chainermn, comm):
    x = np.sin(np.arange(12, dtype=np.float32)).reshape(2, 3, 2)

    def train():
        return trained(normalization(chainermn, comm, (3, 2)), x)

    return outcome(train)


@case
def batch_normalization_gradients_after_their_mean(chainermn, comm):
    """With the running variance set, in whose start the two differ."""
    link = normalization(chainermn, comm)
    link.avg_var = np.ones(3, np.float32)
    trained(link, plain(comm.rank))
    comm.multi_node_mean_grad(link)
    return grads(link), link.avg_mean


@case
def finetuning(chainermn, comm):
    link = normalization(chainermn, comm)
    link.start_finetuning()
    before = link.N
    for _ in range(2):
        link(plain(comm.rank), finetune=True)
    return before, state(link)


@case
def batch_normalization_attributes(chainermn, comm):
    link = normalization(chainermn, comm)
    return link.decay, link.eps, link.comm is comm, link.N, link.avg_mean, link.avg_var


@case
def batch_normalization_is_chainers(chainermn, comm):
    return isinstance(normalization(chainermn, comm), L.BatchNormalization)


@each("auto", "mpi", "nccl", "unknown")
def get_communication_backend(chainermn, comm, name):
    module = importlib.import_module("chainermn.functions.batch_normalization")
    return module.get_communication_backend(comm, name)


# -- create_mnbn_model


class Net(Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.a = linear()
            self.bn = L.BatchNormalization(2, eps=1e-3, decay=0.5)

    def forward(self, x):
        return self.bn(self.a(x))


def plain_chain_list():
    return ChainList(linear(), L.BatchNormalization(2))


def sequential():
    return Sequential(linear(), F.relu, L.BatchNormalization(2))


def alone():
    return L.BatchNormalization(2, use_beta=False)


def nested():
    return Chain(inner=Net(), bn=L.BatchNormalization(3))


MODELS = {
    "chain": Net,
    "chain list": plain_chain_list,
    "sequential": sequential,
    "alone": alone,
    "nested": nested,
    "without": linear,
}


def kinds(link):
    return {path: type(child).__name__ for path, child in link.namedlinks()}


@each(**MODELS)
def create_mnbn_model(chainermn, comm, make):
    model = chainermn.links.create_mnbn_model(make(), comm)
    return kinds(model), state(model)


class Own(L.BatchNormalization):
    def forward(self, x):
        return super().forward(x) + 1


@case
def create_mnbn_model_of_a_class(chainermn, comm):
    """That computes something of its own."""
    model = chainermn.links.create_mnbn_model(Sequential(linear(), Own(2)), comm)
    return kinds(model), isinstance(model[1], Own)


@case
def mnbn_models_share_nothing(chainermn, comm):
    model = Net()
    made = chainermn.links.create_mnbn_model(model, comm, communication_backend="mpi")
    return (
        kinds(model),
        made.a is model.a,
        made.a.W is model.a.W,
        made.a.W.array is model.a.W.array,
    )


@case
def mnbn_models_train(chainermn, comm):
    model = chainermn.links.create_mnbn_model(Net(), comm)
    return trained(model, inputs(comm.rank) * (comm.rank + 1))


# -- MultiNodeChainList


class OnRank0(Chain):
    def __init__(self):
        super().__init__(l=linear())

    def forward(self, x):
        return self.l(x)


class Tuple(Chain):
    def __init__(self):
        super().__init__(l=linear())

    def forward(self, x):
        return self.l(x), self.l(x) * 2


class OnRank1(Chain):
    def __init__(self):
        super().__init__(l=L.Linear(2, 2, initialW=0.5))

    def forward(self, *xs):
        if isinstance(xs[0], tuple):
            (xs,) = xs
        return self.l(sum(xs))


def run(model, *xs):
    """Its output and gradients."""
    y = model(*xs)
    model.cleargrads()
    if y.size:
        F.sum(y).backward()
    else:
        y.backward()
    return y, grads(model)


@case
def chain_list(chainermn, comm):
    model = chainermn.MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(OnRank0(), rank_in=None, rank_out=1)
        return run(model, inputs())
    model.add_link(OnRank1(), rank_in=0, rank_out=None)
    return run(model)


@case
def chain_list_there_and_back(chainermn, comm):
    model = chainermn.links.MultiNodeChainList(comm=comm)
    if comm.rank == 0:
        model.add_link(OnRank0(), None, 1)
        model.add_link(OnRank1(), 1, None)
        return run(model, inputs())
    model.add_link(OnRank1(), 0, 0)
    return run(model)


@case
def chain_list_of_tuples(chainermn, comm):
    model = chainermn.MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(Tuple(), rank_out=1)
        return run(model, inputs())
    model.add_link(OnRank1(), rank_in=0)
    return run(model)


@case
def chain_list_without_links(chainermn, comm):
    return chainermn.MultiNodeChainList(comm)(inputs())


@case
def chain_list_attributes(chainermn, comm):
    model = chainermn.MultiNodeChainList(comm)
    added = model.add_link(OnRank0())
    names = [name for name, _ in sorted(model.namedparams())]
    return added, len(model), names, isinstance(model, ChainList)


# -- create_multi_node_n_step_rnn


RNNS = {
    "LSTM": L.NStepLSTM,
    "GRU": L.NStepGRU,
    "RNNTanh": L.NStepRNNTanh,
    "BiLSTM": L.NStepBiLSTM,
}


def sequences():
    return [inputs()[:1] * 0.1, inputs() * 0.1]


@each(**RNNS)
def n_step_rnn(chainermn, comm, kind):
    make = chainermn.links.create_multi_node_n_step_rnn
    link = kind(1, 3, 3, 0)
    for param in link.params():
        param.array.fill(0.1)
    neighbour = {"rank_in": 0}
    if comm.rank == 0:
        neighbour = {"rank_out": 1}
    model = make(link, comm, **neighbour)
    *outputs, delegate = model(sequences())
    model.cleargrads()
    if comm.rank == 0:
        delegate.backward()
    else:
        sum(F.sum(y) for y in outputs[-1]).backward()
    return outputs, delegate, grads(model)


@case
def n_step_rnn_of_one_rank(chainermn, comm):
    link = L.NStepLSTM(1, 3, 3, 0)
    for param in link.params():
        param.array.fill(0.1)
    model = chainermn.links.create_multi_node_n_step_rnn(link, comm)
    return model(sequences()), [name for name, _ in sorted(model.namedparams())]


@case
def n_step_rnn_of_another_link(chainermn, comm):
    return chainermn.links.create_multi_node_n_step_rnn(linear(), comm)

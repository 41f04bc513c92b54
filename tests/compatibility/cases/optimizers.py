"""The optimizer that averages gradients."""

from __future__ import annotations

import chainer
import numpy as np
from chainer import ChainList
from chainer.optimizers import SGD, AdaGrad, Adam, MomentumSGD
from chainer.serializers import DictionarySerializer

from .models import Loss, backward, grads, inputs, linear, state
from .table import case, each, outcome

RULES = {
    "SGD": SGD,
    "MomentumSGD": MomentumSGD,
    "Adam": Adam,
    "AdaGrad": AdaGrad,
}


def made(chainermn, comm, model, rule=None, **how):
    rule = rule or SGD(0.001)
    optimizer = chainermn.create_multi_node_optimizer(rule, comm, **how)
    optimizer.setup(model)
    return optimizer


@case
def attributes(chainermn, comm):
    model = linear()
    rule = Adam(alpha=0.25)
    optimizer = made(chainermn, comm, model, rule)
    return {
        "alpha": optimizer.alpha,
        "t": optimizer.t,
        "epoch": optimizer.epoch,
        "target": optimizer.target is model,
        "actual_optimizer": optimizer.actual_optimizer is rule,
        "communicator": optimizer.communicator is comm,
        "zero_fill": optimizer.zero_fill,
        "hyperparam": optimizer.hyperparam.alpha,
    }


@case
def attributes_are_set_on_the_actual_one(chainermn, comm):
    rule = SGD(0.5)
    optimizer = made(chainermn, comm, linear(), rule)
    optimizer.lr = 0.125
    return rule.lr, optimizer.lr


@each("target", "nothing")
def attribute(chainermn, comm, name):
    rule = SGD(0.5)
    optimizer = chainermn.create_multi_node_optimizer(rule, comm)
    return getattr(optimizer, name)


@case
def is_no_optimizer_of_chainers(chainermn, comm):
    optimizer = made(chainermn, comm, linear())
    return isinstance(optimizer, chainer.Optimizer), isinstance(
        optimizer, chainer.GradientMethod
    )


@case
def the_first_update_gives_parameters_to_all(chainermn, comm):
    model = linear(comm.rank + 1.0)
    optimizer = made(chainermn, comm, model)
    backward(model, comm.rank)
    return optimizer.update(), state(model), optimizer.t


@case
def the_first_update_with_a_loss(chainermn, comm):
    model = Loss(comm.rank + 1.0)
    optimizer = made(chainermn, comm, model)
    return optimizer.update(model, inputs(comm.rank)), state(model), optimizer.t


@each(**RULES)
def two_updates_with_a_loss(chainermn, comm, rule):
    """Without the first, which steps in one of them and doesn't in the other."""
    model = Loss()
    optimizer = made(chainermn, comm, model, rule())
    backward(model.linear, comm.rank)
    optimizer.update()
    results = [optimizer.update(model, inputs(comm.rank)) for _ in range(2)]
    return results, state(model), grads(model), optimizer.t


@case
def a_loss_is_called_with_the_arguments(chainermn, comm):
    model = linear()
    optimizer = made(chainermn, comm, model)
    backward(model, comm.rank)
    optimizer.update()
    calls = []

    def loss(*args, **kwargs):
        calls.append((args, kwargs))
        return chainer.functions.sum(model(inputs(comm.rank)))

    optimizer.update(loss, 1, "two", three=3)
    return calls


@each(True, False)
def zero_fill(chainermn, comm, fill):
    model = linear()
    optimizer = made(chainermn, comm, model, zero_fill=fill)
    for _ in range(2):
        model.cleargrads()
        model.W.grad = np.full((2, 3), comm.rank + 1, np.float32)
        optimizer.update()
    return state(model), grads(model)


@case
def a_parameter_that_is_added_later(chainermn, comm):
    model = ChainList(linear(comm.rank + 1.0))
    optimizer = made(chainermn, comm, model)
    backward(model[0], comm.rank)
    optimizer.update()
    model.append(linear(comm.rank + 5.0))
    backward(model[0], comm.rank)
    backward(model[1], comm.rank)
    optimizer.update()
    return state(model), optimizer.t


@case
def serialized(chainermn, comm):
    model = linear()
    optimizer = made(chainermn, comm, model, MomentumSGD(0.001))
    for _ in range(2):
        backward(model, comm.rank)
        optimizer.update()
    serializer = DictionarySerializer()
    serializer.save(optimizer)
    return sorted(serializer.target)


@case
def setup_twice(chainermn, comm):
    first = linear(comm.rank)
    second = linear(comm.rank + 1.0)
    optimizer = made(chainermn, comm, first)
    backward(first, comm.rank)
    optimizer.update()
    optimizer.setup(second)
    backward(second, comm.rank)
    optimizer.update()
    return state(first), state(second), optimizer.t


@case
def update_without_setup(chainermn, comm):
    return chainermn.create_multi_node_optimizer(SGD(), comm).update()


@case
def double_buffering(chainermn, comm):
    model = linear()
    optimizer = made(chainermn, comm, model, double_buffering=True)
    for _ in range(3):
        backward(model, comm.rank)
        optimizer.update()
    return state(model)


@case
def wrapped_twice(chainermn, comm):
    optimizer = chainermn.create_multi_node_optimizer(SGD(), comm)
    return outcome(lambda: chainermn.create_multi_node_optimizer(optimizer, comm).lr)


@each("train_mnist", "loss_scaling")
def common_setups(chainermn, comm, which):
    model = Loss(comm.rank)
    rule = Adam()
    optimizer = chainermn.create_multi_node_optimizer(rule, comm)
    optimizer.setup(model)
    if which == "loss_scaling":
        optimizer.loss_scaling(scale=4)
    backward(model.linear, comm.rank)
    optimizer.update()
    optimizer.update(model, inputs(comm.rank))
    return state(model)

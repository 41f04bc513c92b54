"""Gradients are reported as soon as they are final: each once, as the array its parameter gets."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, Variable, using_config
from numpy.testing import assert_array_equal

from chainermn_train.optimizers.exchanges import tracked_backward
from tests.support.training.overlapped import marked

WIDTH = 4
X = np.arange(2 * WIDTH, dtype="f4").reshape(2, WIDTH) / 10


class Net(Chain):
    def __init__(self):
        super().__init__()
        np.random.seed(0)
        with self.init_scope():
            self.first = L.Linear(WIDTH, WIDTH)
            self.second = L.Linear(WIDTH, WIDTH)
            self.unused = L.Linear(WIDTH, 1)
        self.cleargrads()


def report_to(events, model, loss, loss_scale=None):
    """Add the names of reported gradients to a list; each array is what the parameter then has."""
    named = list(model.namedparams())
    reported = {}

    def on_final(number, grad):
        name, _ = named[number]
        assert name not in reported
        reported[name] = grad
        events.append(name)

    params = [param for _, param in named]
    tracked_backward.backward(loss, params, on_final, loss_scale)
    for name, param in named:
        assert param.grad is reported.get(name, param.grad), name


BOTH = ["/first/W", "/first/b", "/second/W", "/second/b"]


def deep(model):
    return F.sum(F.tanh(model.second(F.tanh(model.first(X)))) ** 2)


def reused(model):
    return F.sum(model.first(F.tanh(model.second(model.first(X)))) ** 2)


def twice_in_one_function(model):
    weight = model.first.W
    return F.sum(F.matmul(weight, weight)) + F.sum(model.second.W * model.second.W)


def own_weight_as_data(model):
    weight = model.first.W
    return F.sum(F.linear(weight, weight) ** 2)


def forgetful(model):
    """A backward within uses what functions before and after it use."""

    def first(h):
        return F.tanh(model.first(h))

    h = F.forget(first, F.tanh(model.first(X)))
    return F.sum(model.first(h) ** 2)


def without_functions(model):
    return Variable(np.ones((), "f4"))


# What is reported where gradients are not added up at the end.
LOSSES = {
    deep: BOTH,
    reused: BOTH,
    twice_in_one_function: ["/first/W", "/second/W"],
    own_weight_as_data: ["/first/W"],
    forgetful: ["/first/W", "/first/b"],
    without_functions: [],
}


@pytest.mark.parametrize("late_sums", [False, True])
@pytest.mark.parametrize("make_loss", LOSSES)
def test_what_is_reported_is_what_parameters_have(make_loss, late_sums):
    """With the bits of a plain backward."""
    model = Net()
    other = Net()
    names = []
    with using_config("lazy_grad_sum", late_sums):
        report_to(names, model, make_loss(model), 8.0)
        make_loss(other).backward(loss_scale=8.0)
    plain = dict(other.namedparams())
    for name, param in model.namedparams():
        assert_array_equal(param.grad, plain[name].grad)
    if not late_sums:
        assert sorted(names) == LOSSES[make_loss]


def test_a_gradient_is_reported_when_its_last_function_has_run():
    model = Net()
    events = []
    h = model.first(marked(X + model.first.b, lambda: events.append("end")))
    h = model.second(marked(F.tanh(h), lambda: events.append("between")))
    report_to(events, model, F.sum(h**2))
    between = events.index("between")
    assert set(events[:between]) == {"/second/W", "/second/b"}
    assert events[between + 1 :] == ["/first/W", "end", "/first/b"]


class BackwardEnds(chainer.FunctionHook):
    """Adds to events when the backward of a linear function has ended; it may fail then."""

    def __init__(self, events, error=None):
        self.events = events
        self.error = error

    def backward_postprocess(self, function, in_data, out_grad):
        if function.label == "LinearFunction":
            self.events.append("end")
            if self.error is not None:
                raise self.error


def test_a_weight_leaves_before_the_gradient_of_its_data_is_computed():
    model = Net()
    events = []
    loss = deep(model)
    with BackwardEnds(events):
        report_to(events, model, loss)
    assert set(events[:2]) == {"/second/W", "/second/b"}
    assert events[2] == "end"


def test_a_layer_whose_backward_fails_is_as_before():
    model = Net()
    loss = deep(model)
    failing = BackwardEnds([], RuntimeError("it fails"))
    with pytest.raises(RuntimeError, match="fails"), failing:
        report_to([], model, loss)
    function = loss.creator
    while function.label != "LinearFunction":
        function = function.inputs[0].creator
    assert "backward" not in vars(function)

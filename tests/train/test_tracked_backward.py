"""Gradients are reported as soon as they are final: each once, as the array its parameter gets."""

from __future__ import annotations

import threading

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from chainermn_train.optimizers import tracked_backward
from tests.support.training.marks import marked

WIDTH = 4
X = np.arange(2 * WIDTH, dtype="f4").reshape(2, WIDTH) / 10


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        np.random.seed(0)
        with self.init_scope():
            self.first = L.Linear(WIDTH, WIDTH)
            self.second = L.Linear(WIDTH, WIDTH)
            self.unused = L.Linear(WIDTH, 1)


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


def forgetful(model):
    """A backward within uses what functions before and after it use."""
    h = F.forget(lambda h: F.tanh(model.first(h)), F.tanh(model.first(X)))
    return F.sum(model.first(h) ** 2)


def with_penalty(model):
    """The gradient of a gradient is within."""
    x = chainer.Variable(X)
    loss = F.sum(F.tanh(model.second(F.tanh(model.first(x)))))
    (grad,) = chainer.grad([loss], [x], enable_double_backprop=True)
    return loss + F.sum(grad**2)


def without_functions(model):
    return chainer.Variable(np.ones((), "f4"))


@pytest.mark.parametrize("loss_scale", [None, 8.0])
@pytest.mark.parametrize("start", [None, 1.0])
@pytest.mark.parametrize("late_sums", [False, True])
@pytest.mark.parametrize(
    ("make_loss", "expected"),
    [
        (deep, BOTH),
        (reused, BOTH),
        (twice_in_one_function, ["/first/W", "/second/W"]),
        (forgetful, None),
        (with_penalty, BOTH),
        (without_functions, []),
    ],
)
def test_what_is_reported_is_what_parameters_have(
    make_loss, expected, start, late_sums, loss_scale
):
    """With the bits of a plain backward, which adds to the gradients that are there."""
    model = Net()
    other = Net()
    for param in [*model.params(), *other.params()]:
        if start is not None:
            param.grad = np.full_like(param.array, start)
    names = []
    with chainer.using_config("lazy_grad_sum", late_sums):
        report_to(names, model, make_loss(model), loss_scale)
        make_loss(other).backward(loss_scale=loss_scale)
    plain = dict(other.namedparams())
    for name, param in model.namedparams():
        np.testing.assert_array_equal(param.grad, plain[name].grad)
    if expected is not None and not (start or late_sums):
        assert sorted(names) == expected


def test_a_gradient_is_reported_when_its_last_function_has_run():
    """Another thread trains meanwhile, and is told of its own gradients only."""
    model = Net()
    events = []
    of_other = []

    def train():
        other = Net()
        report_to(of_other, other, deep(other))

    def train_another():
        events.append("between")
        thread = threading.Thread(target=train)
        thread.start()
        thread.join(60)

    h = model.first(marked(X + model.first.b, lambda: events.append("end")))
    h = model.second(marked(F.tanh(h), train_another))
    model.cleargrads()
    report_to(events, model, F.sum(h**2))
    between = events.index("between")
    assert set(events[:between]) == {"/second/W", "/second/b"}
    assert events[between + 1 :] == ["/first/W", "end", "/first/b"]
    assert sorted(of_other) == BOTH

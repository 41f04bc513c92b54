"""Gradients are told of as soon as they are final: each once, as the array its parameter gets."""

from __future__ import annotations

import importlib
import threading

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.functions.connection.linear import LinearFunction

from chainermn_train.optimizers import tracked_backward
from tests.support.training.marks import PlantedError, marked, raise_planted

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


def gradients(model):
    return {name: param.grad for name, param in model.namedparams()}


def told_of(model, loss, loss_scale=None, events=None):
    """The names told of, in order; each array is what the parameter then has."""
    named = list(model.namedparams())
    events = [] if events is None else events
    told = {}

    def on_final(index, grad):
        name, _ = named[index]
        assert name not in told
        told[name] = grad
        events.append(name)

    params = [param for _, param in named]
    tracked_backward.backward(loss, params, on_final, loss_scale)
    found = gradients(model)
    for name, grad in told.items():
        assert found[name] is grad, name
    return list(told)


BOTH = ["/first/W", "/first/b", "/second/W", "/second/b"]


def deep(model):
    return F.sum(F.tanh(model.second(F.tanh(model.first(X)))) ** 2)


def reused(model):
    return F.sum(model.first(F.tanh(model.second(model.first(X)))) ** 2)


def twice_in_one_function(model):
    weight = model.first.W
    return F.sum(F.matmul(weight, weight)) + F.sum(model.second.W * model.second.W)


def own_weight_as_data(model):
    """The layer's data and weight are one variable."""
    return F.sum(F.linear(model.first.W, model.first.W) ** 2)


def forgetful(model):
    """A backward within uses what functions before and after it use."""
    h = F.forget(lambda h: F.tanh(model.first(h)), F.tanh(model.first(X)))
    return F.sum(model.first(h) ** 2)


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
        (own_weight_as_data, ["/first/W"]),
        (forgetful, None),
        (without_functions, []),
    ],
)
def test_what_is_told_of_is_what_parameters_have(
    make_loss, expected, start, late_sums, loss_scale
):
    """With the bits of a plain backward, which adds to the gradients that are there."""
    model, other = Net(), Net()
    for param in [*model.params(), *other.params()]:
        param.grad = None if start is None else np.full_like(param.array, start)
    with chainer.using_config("lazy_grad_sum", late_sums):
        names = told_of(model, make_loss(model), loss_scale)
        make_loss(other).backward(loss_scale=loss_scale)
    plain = gradients(other)
    for name, grad in gradients(model).items():
        np.testing.assert_array_equal(grad, plain[name])
    if not (expected is None or start or late_sums):
        assert sorted(names) == expected


def test_a_parameter_is_told_of_when_its_last_function_has_run():
    model, events = Net(), []
    h = model.first(marked(X + model.first.b, lambda: events.append("end")))
    h = model.second(marked(F.tanh(h), lambda: events.append("between")))
    model.cleargrads()
    told_of(model, F.sum(h**2), events=events)
    between = events.index("between")
    assert set(events[:between]) == {"/second/W", "/second/b"}
    assert events[between + 1 :] == ["/first/W", "end", "/first/b"]


def test_a_layers_weight_is_told_of_before_the_gradient_of_its_data_is_computed():
    model, events = Net(), []

    class Spied(chainer.FunctionHook):
        name = "spied"

        def forward_postprocess(self, function, inputs):
            events.append(f"computed {function.label}")

    h = model.second(F.tanh(model.first(X)))
    with Spied():
        told_of(model, F.sum(h), events=events)
    later = events[events.index("/second/W") + 1 : events.index("/first/W")]
    assert any("Linear" in each for each in later), events


def test_hooks_of_the_user_run_as_ever():
    seen = []

    class Hook(chainer.FunctionHook):
        name = "user's"

        def backward_preprocess(self, function, inputs, gradients):
            seen.append(("before", function.label))

        def backward_postprocess(self, function, inputs, gradients):
            seen.append(("after", function.label))

    with Hook():
        told_of(Net(), deep(Net()))
        tracked, seen[:] = list(seen), []
        deep(Net()).backward()
    assert tracked == seen
    assert seen


@pytest.mark.parametrize("place", ["above", "below", "within a layer"])
def test_a_graph_whose_backward_failed_is_as_it_was(place, monkeypatch):
    """Another backward of it computes what is right, and tells nobody."""
    model, told, before = Net(), [], names_of_chainers()
    failing = {place}

    def fail_at(where):
        return lambda: raise_planted() if where in failing else None

    h = model.first(marked(X, fail_at("below")))
    loss = F.sum(marked(h, fail_at("above")) ** 2)
    params = list(model.params())
    with monkeypatch.context() as patch:
        if place == "within a layer":
            patch.setattr(LinearFunction, "backward", lambda *_: raise_planted())
        with pytest.raises(PlantedError):
            tracked_backward.backward(loss, params, lambda *it: told.append(it), None)
    assert names_of_chainers() == before
    assert not chainer.get_function_hooks()
    count = len(told)
    failing.clear()
    model.cleargrads()
    loss.backward()
    assert len(told) == count
    np.testing.assert_array_equal(model.first.b.grad, (2 * h.array).sum(0))


# Threads.


def names_of_chainers():
    """What modules of Chainer's backward hold, by name."""
    names = "_backprop", "_backprop_utils", "variable"
    modules = [importlib.import_module(f"chainer.{name}") for name in names]
    return [dict(vars(module)) for module in modules]


class Gated:
    """A thread whose backward waits in its middle until it may go on."""

    def __init__(self):
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self.told = []
        self.thread = threading.Thread(target=self.train)
        self.thread.start()
        assert self.begun.wait(60)

    def train(self):
        model = Net()
        h = marked(model.first(X), self.wait)
        self.told += told_of(model, F.sum(model.second(h) ** 2))

    def wait(self):
        self.begun.set()
        assert self.may_go_on.wait(60)

    def end(self):
        self.may_go_on.set()
        self.thread.join(60)


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_threads_leave_chainer_as_it_was(first_to_end):
    """One begins while the other is within; a third one, which trains without us, isn't watched."""
    before, other = names_of_chainers(), Net()
    threads = [Gated(), Gated()]
    assert names_of_chainers() == before  # also while they are within
    deep(other).backward()
    assert other.first.W.grad.any()
    for number in first_to_end, 1 - first_to_end:
        threads[number].end()
        assert names_of_chainers() == before
    expected = ["/second/W", "/second/b", "/first/W", "/first/b"]
    assert [each.told for each in threads] == [expected, expected]

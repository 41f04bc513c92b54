"""Gradients are told of as soon as they are final: each once, as the array its parameter gets."""

from __future__ import annotations

import importlib
import threading

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from chainermn_train.optimizers import tracked_backward

WIDTH = 4
X = np.arange(2 * WIDTH, dtype="f4").reshape(2, WIDTH) / 10


class Net(chainer.Chain):
    def __init__(self):
        super().__init__()
        np.random.seed(0)
        with self.init_scope():
            self.first, self.second = L.Linear(WIDTH, WIDTH), L.Linear(WIDTH, WIDTH)
            self.unused = L.Linear(WIDTH, 1)


class PlantedError(Exception):
    """What a backward raises."""


class Mark(chainer.FunctionNode):
    """The identity, that tells of its backward."""

    def __init__(self, told):
        self.told = told

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, grad_outputs):
        self.told()
        return grad_outputs


def marked(x, told):
    return Mark(told).apply((chainer.as_variable(x),))[0]


def raise_planted():
    raise PlantedError


def gradients(model):
    return {name: param.grad for name, param in model.namedparams()}


def told_of(model, loss, loss_scale=None, events=None):
    """The names told of, in order; each array is what the parameter then has."""
    named = list(model.namedparams())
    told = []

    def on_final(place, grad):
        told.append((named[place][0], grad))
        if events is not None:
            events.append(named[place][0])

    model.cleargrads()
    tracked_backward.backward(loss, [param for _, param in named], on_final, loss_scale)
    assert len({name for name, _ in told}) == len(told)
    found = gradients(model)
    for name, grad in told:
        assert found[name] is grad, name
    return [name for name, _ in told]


def assert_as_ever(make_loss, loss_scale=None, expected=None):
    """Gradients have the bits of a plain backward; those told of are `expected`."""
    model, other = Net(), Net()
    names = told_of(model, make_loss(model), loss_scale)
    other.cleargrads()
    make_loss(other).backward(loss_scale=loss_scale)
    plain = gradients(other)
    for name, grad in gradients(model).items():
        assert (grad is None) == (plain[name] is None), name
        np.testing.assert_array_equal(grad, plain[name])
    if expected is not None:
        assert sorted(names) == sorted(expected)


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
    return F.sum(F.forget(lambda h: model.second(h) ** 2, model.first(X)))


def forgetful_between(model):
    """A backward within uses what functions before and after it use."""
    h = F.forget(lambda h: F.tanh(model.first(h)), F.tanh(model.first(X)))
    return F.sum(model.first(h) ** 2)


@pytest.mark.parametrize("loss_scale", [None, 8.0])
@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (deep, BOTH),
        (reused, BOTH),
        (twice_in_one_function, ["/first/W", "/second/W"]),
        (own_weight_as_data, ["/first/W"]),
        (forgetful, None),
        (forgetful_between, None),
        (lambda model: F.sum(model.second(X)), ["/second/W", "/second/b"]),
    ],
)
def test_what_is_told_of_is_what_parameters_have(loss, expected, loss_scale):
    assert_as_ever(loss, loss_scale, expected)


def test_a_parameter_is_told_of_when_its_last_function_has_run():
    model, events = Net(), []
    h = model.first(marked(X + model.first.b, lambda: events.append("end")))
    h = model.second(marked(F.tanh(h), lambda: events.append("between")))
    told_of(model, F.sum(h**2), events=events)
    assert set(events[: events.index("between")]) == {"/second/W", "/second/b"}
    assert events[events.index("between") + 1 : events.index("end")] == ["/first/W"]
    assert events[events.index("end") :] == ["end", "/first/b"]


def test_a_layers_weight_is_told_of_before_the_gradient_of_its_data_is_computed():
    model, events = Net(), []

    class Spied(chainer.FunctionHook):
        name = "spied"

        def forward_postprocess(self, function, inputs):
            events.append(f"computed {function.label}")

    h = model.second(F.tanh(model.first(X)))
    with Spied():
        told_of(model, F.sum(h), events=events)
    weight = events.index("/second/W")
    later = events[weight + 1 : events.index("/first/W")]
    assert any(each.startswith("computed") and "Linear" in each for each in later), (
        events
    )


def test_sums_that_chainer_takes_late_are_not_told_of_but_right():
    with chainer.using_config("lazy_grad_sum", True):
        assert_as_ever(reused)


def test_gradients_that_are_there_already_are_added_to():
    model = Net()
    named = list(model.namedparams())
    told = {}
    for _, param in named:
        param.grad = np.ones_like(param.array)
    tracked_backward.backward(
        deep(model), [param for _, param in named], told.__setitem__, None
    )
    other = Net()
    for param in other.params():
        param.grad = np.ones_like(param.array)
    deep(other).backward()
    plain = gradients(other)
    for place, (name, param) in enumerate(named):
        np.testing.assert_array_equal(param.grad, plain[name])
        assert place not in told or told[place] is param.grad


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
    assert "ChainerMN" not in chainer.get_function_hooks()


@pytest.mark.parametrize("place", ["above", "below"])
def test_a_graph_whose_backward_failed_is_as_it_was(place):
    """Another backward of it computes what is right, and tells nobody."""
    model, fail, told = Net(), [True], []

    def fail_once():
        if fail[0]:
            raise_planted()

    x = chainer.Variable(X)
    h = model.first(marked(x, fail_once) if place == "below" else x)
    loss = F.sum(marked(h, fail_once) ** 2)
    params = list(model.params())
    with pytest.raises(PlantedError):
        tracked_backward.backward(loss, params, lambda *each: told.append(each), None)
    assert "ChainerMN" not in chainer.get_function_hooks()
    count, fail[0] = len(told), False
    model.cleargrads()
    loss.backward()
    assert len(told) == count
    np.testing.assert_array_equal(model.first.b.grad, (2 * h.array).sum(0))


def test_a_layer_that_failed_has_its_own_backward_again(monkeypatch):
    from chainer.functions.connection.linear import LinearFunction

    model = Net()
    loss = F.sum(model.first(X))
    function = loss.creator_node.inputs[0].creator_node
    assert type(function) is LinearFunction
    with monkeypatch.context() as patch:
        patch.setattr(LinearFunction, "backward", lambda *_: raise_planted())
        with pytest.raises(PlantedError):
            tracked_backward.backward(loss, list(model.params()), lambda *_: None, None)
    assert "backward" not in vars(function)
    loss.backward()
    assert model.first.W.grad.any()


def test_a_loss_that_no_function_computed_tells_nothing():
    model = Net()
    assert told_of(model, chainer.Variable(np.ones((), "f4"))) == []


class Gate(chainer.FunctionNode):
    """The identity, whose backward says that it has begun, and waits until it may go on."""

    def __init__(self):
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def forward(self, inputs):
        return inputs

    def backward(self, indexes, grad_outputs):
        self.begun.set()
        assert self.may_go_on.wait(60)
        return grad_outputs


def names_of_chainers():
    """What modules of Chainer's backward hold, by name."""
    names = "_backprop", "_backprop_utils", "variable"
    modules = [importlib.import_module(f"chainer.{name}") for name in names]
    return [dict(vars(module)) for module in modules]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_threads_leave_chainer_as_it_was(first_to_end, fails):
    """One begins while the other is within, and either ends first, with an error or none."""
    before, found = names_of_chainers(), {}
    gates = [Gate(), Gate()]

    def train(number):
        model = Net()
        h = gates[number].apply((model.first(X),))[0]
        if fails:
            h = model.second(marked(h, raise_planted))
        try:
            found[number] = told_of(model, F.sum(model.second(h) ** 2))
        except PlantedError:
            found[number] = None

    threads = [threading.Thread(target=train, args=[number]) for number in (0, 1)]
    if fails:
        gates[0].may_go_on.set()
        gates[1].may_go_on.set()
    for number, thread in enumerate(threads):
        thread.start()
        assert fails or gates[number].begun.wait(60)
        assert names_of_chainers() == before  # also while they are within
    for number in (first_to_end, 1 - first_to_end):
        gates[number].may_go_on.set()
        threads[number].join(60)
        assert names_of_chainers() == before
    expected = None if fails else ["/second/W", "/second/b", "/first/W", "/first/b"]
    assert found == {0: expected, 1: expected}


def test_a_thread_that_trains_without_us_is_not_watched():
    gate, told = Gate(), []
    model, other = Net(), Net()
    h = gate.apply((model.first(X),))[0]
    thread = threading.Thread(
        target=tracked_backward.backward,
        args=[F.sum(h), list(model.params()), lambda *each: told.append(each), None],
    )
    thread.start()
    assert gate.begun.wait(60)
    deep(other).backward()
    assert told == []
    gate.may_go_on.set()
    thread.join(60)
    assert len(told) == 2
    assert other.first.W.grad.any()

"""`MultiNodeChainList` computes what the same graph computes in one process."""

from __future__ import annotations

import copy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Variable

from chainermn_modelparallel import MultiNodeChainList, send
from tests.support.graphs import (
    Component,
    Part,
    check_drawn,
    components,
    flat,
    in_one_process,
    loss_of,
    model_input,
)
from tests.support.third_party import WITH_STRANGER

pytestmark = pytest.mark.world


def check(comm, graph: list[Part]) -> None:
    """This rank's components give what they give in one process, forward and backward."""
    reference = components(graph)
    expected = in_one_process(graph, reference)
    for link in reference:
        link.cleargrads()
    sum(map(loss_of, expected.values())).backward()
    model = MultiNodeChainList(comm)
    mine = []
    for part, link, alone in zip(graph, components(graph), reference, strict=True):
        if part.rank == comm.rank:
            model.add_link(link, part.rank_in, part.rank_out)
            mine.append((link, alone))
    if not mine:
        return
    model.cleargrads()
    found = model(model_input())
    if comm.rank in expected:
        for y, x in zip(flat(found), flat(expected[comm.rank]), strict=True):
            np.testing.assert_allclose(y.array, x.array, rtol=1e-12, atol=1e-12)
        loss_of(found).backward()
    else:
        assert found.shape == (0,)
        found.backward()
    for link, alone in mine:
        if alone.w.grad is None:
            assert link.w.grad is None or not link.w.grad.any()
        else:
            np.testing.assert_allclose(link.w.grad, alone.w.grad, rtol=1e-12, atol=1e-12)


SIMPLE = [Part(0, None, 1), Part(1, 0, None)]
SPLIT = [Part(0, None, 1), Part(1, 0, 0), Part(0, 1, None)]
TUPLES = [Part(0, None, 1, gives=2), Part(1, 0, None)]
CONNECTED = [Part(3, None, 0), Part(0, 3, 1), Part(1, 0, None)]
NON_CONNECTED = [Part(3, None, 0), Part(0, 3, 1), Part(1, 0, 0), Part(0, 1, 2), Part(2, 0, None)]
NON_CONNECTED_2 = [Part(1, None, 0), Part(0, 1, None), Part(0, None, 1), Part(1, 0, None)]
BRANCHES = [Part(0, None, [1, 2]), Part(1, 0, 3), Part(2, 0, 3), Part(3, [1, 2], 0), Part(0, 3)]
UNUSED = [Part(0, None, 1), Part(1, 0, 0, uses_input=False), Part(0, 1, None)]
OWN = [Part(0, None, [0, 1]), Part(0, 0, 1), Part(1, [0, 0], None)]


MODES = ("share", "copy")  # not "init": parameters of these have no initializers


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("graph", [SIMPLE, SPLIT, TUPLES, NON_CONNECTED_2, UNUSED, OWN])
def test_examples_on_two_ranks(comm, graph):
    check(comm, graph)


@pytest.mark.sizes(4)
@pytest.mark.parametrize("graph", [CONNECTED, NON_CONNECTED, BRANCHES])
def test_examples_on_four_ranks(comm, graph):
    check(comm, graph)


@pytest.mark.sizes(2, 3, 4)
@WITH_STRANGER
def test_any_graph(comm):
    check_drawn(lambda graph: check(comm, graph), comm.size, 15)


@pytest.mark.full
@pytest.mark.sizes(2, 3, 4)
def test_any_graph_at_length(comm):
    check_drawn(lambda graph: check(comm, graph), comm.size, 100)


@pytest.mark.sizes(2)
def test_training_updates_all_components_and_saves_them(comm, tmp_path):
    model = model_of(comm, SPLIT)
    optimizer = chainer.optimizers.SGD(0.1).setup(model)
    before = [param.array.copy() for param in model.params()]

    def lossfun():
        outputs = model(model_input())
        return outputs if comm.rank == 1 else loss_of(outputs)

    optimizer.update(lossfun)
    for old, param in zip(before, model.params(), strict=True):
        assert (old != param.array).all()
    chainer.serializers.save_npz(tmp_path / f"{comm.rank}.npz", model)
    other = model_of(comm, SPLIT)
    chainer.serializers.load_npz(tmp_path / f"{comm.rank}.npz", other)
    for a, b in zip(model.params(), other.params(), strict=True):
        np.testing.assert_array_equal(a.array, b.array)


def model_of(comm, graph: list[Part]) -> MultiNodeChainList:
    model = MultiNodeChainList(comm)
    for part, link in zip(graph, components(graph), strict=True):
        if part.rank == comm.rank:
            model.add_link(link, part.rank_in, part.rank_out)
    return model


@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, *(lambda m, mode=mode: m.copy(mode) for mode in MODES)],
)
def test_a_copy_works_beside_the_original(comm, duplicate):
    model = model_of(comm, SPLIT)
    twin = duplicate(model)
    assert twin is not model
    outputs = [each(model_input()) for each in (model, twin)]
    for output in reversed(outputs):
        output.backward() if comm.rank == 1 else loss_of(output).backward()
    assert all(param.grad is not None for param in twin.params())


@pytest.mark.sizes(2)
def test_a_copy_with_parameters_drawn_anew_works_beside_the_original(comm):
    model = MultiNodeChainList(comm)
    model.add_link(L.Linear(2, 2), *((None, 1) if comm.rank == 0 else (0, None)))
    twin = model.copy("init")
    assert (twin[0].W.array != model[0].W.array).any()
    model.cleargrads(), twin.cleargrads()
    outputs = [each(np.ones((1, 2), "f")) for each in (model, twin)]
    for output in reversed(outputs):
        loss_of(output).backward() if comm.rank == 1 else output.backward()
    assert all(np.isfinite(param.grad).all() for each in (model, twin) for param in each.params())


@pytest.mark.sizes(2)
def test_without_backprop_nothing_waits_for_gradients(comm):
    model = model_of(comm, SPLIT)
    with chainer.no_backprop_mode():
        outputs = model(model_input())
    assert outputs.creator is None


@pytest.mark.sizes(1, 2, 3, 4)
def test_wrong_components_are_refused_by_name(comm):
    model, link, mine = MultiNodeChainList(comm), chainer.Chain(), f"rank {comm.rank}: "
    with pytest.raises(TypeError, match=f"{mine}a component must be a chainer.Link, not str"):
        model.add_link("link")
    with pytest.raises(ValueError, match=f"{mine}there is no rank {comm.size}"):
        model.add_link(link, rank_in=comm.size)
    with pytest.raises(TypeError, match=f"{mine}rank must be an integer, got float"):
        model.add_link(link, rank_out=1.0)
    with pytest.raises(ValueError, match=f"{mine}rank_in must not be empty"):
        model.add_link(link, rank_in=[])
    with pytest.raises(ValueError, match=f"{mine}add each component with add_link"):
        model()
    model.add_link(link)
    with pytest.raises(ValueError, match="one output"):
        model.add_link(chainer.Chain())
    assert len(model) == 1
    with pytest.raises(TypeError, match="create_communicator, not str"):
        MultiNodeChainList("naive")


@pytest.mark.sizes(1, 2)
def test_what_goes_to_the_own_rank_must_be_received_there(comm):
    sends, receives = MultiNodeChainList(comm), MultiNodeChainList(comm)
    sends.add_link(Component(0, 1, True), None, comm.rank)
    with pytest.raises(ValueError, match=f"no later one has rank_in={comm.rank}"):
        sends(model_input())
    receives.add_link(Component(0, 1, True), comm.rank, None)
    with pytest.raises(ValueError, match=f"no earlier one has rank_out={comm.rank}"):
        receives(model_input())


@pytest.mark.sizes(2)
@WITH_STRANGER
def test_it_talks_to_ranks_that_use_the_functions_alone(comm):
    x = Variable(model_input())
    if comm.rank == 0:
        delegate = send(x, comm, 1)
        delegate.backward()
        assert x.grad is not None
    else:
        loss_of(model_of(comm, SIMPLE)()).backward()


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize(
    ("returned", "text"),
    [(None, "NoneType"), ((), "an empty one"), ({"y": 1}, "dict"), ((np.ones(1), 2.0), "float")],
)
@pytest.mark.parametrize("rank_out", [None, 0])
def test_what_a_component_returned_is_told_by_its_name(comm, returned, text, rank_out):
    """None with rank_out=None would be silence: the rank's loss without its component."""

    class Forgetful(chainer.Chain):
        def forward(self, *arguments):
            return returned

    model = MultiNodeChainList(comm)
    model.add_link(chainer.Sequential(F.square), None, comm.rank)
    model.add_link(Forgetful(), comm.rank, rank_out)
    told = rf"rank {comm.rank}: component 1 \(Forgetful\) must return a variable.* got {text}"
    with pytest.raises(TypeError, match=told):
        model(np.ones(2, "f"))


def test_a_component_added_to_a_copy_is_not_the_originals(comm):
    model = MultiNodeChainList(comm)
    model.add_link(chainer.Sequential(F.square))
    twin = model.copy()
    twin.add_link(chainer.Sequential(F.square), comm.rank, comm.rank)
    np.testing.assert_array_equal(model(np.full(2, 3, "f")).array, [9, 9])

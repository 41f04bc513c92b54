"""`MultiNodeChainList` computes what the same graph computes in one process."""

from __future__ import annotations

from collections import namedtuple
from copy import copy, deepcopy
from operator import methodcaller

import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, ChainList, Sequential, Variable
from numpy.testing import assert_allclose, assert_array_equal

from chainermn_modelparallel import MultiNodeChainList
from tests.support.oracles import graphs
from tests.support.oracles.graphs import Component, Part

pytestmark = pytest.mark.world


def model_of(comm, graph):
    model = MultiNodeChainList(comm)
    for part, link in zip(graph, graphs.components(graph), strict=True):
        if part.rank == comm.rank:
            model.add_link(link, part.rank_in, part.rank_out)
    return model


def check(comm, graph):
    """This rank's components give what they give in one process, forward and backward."""
    reference = graphs.components(graph)
    expected = graphs.in_one_process(graph, reference)
    for link in reference:
        link.cleargrads()
    sum(map(graphs.loss_of, expected.values())).backward()
    mine = [
        link
        for part, link in zip(graph, reference, strict=True)
        if part.rank == comm.rank
    ]
    if not mine:
        return
    model = model_of(comm, graph)
    model.cleargrads()
    found = model(graphs.model_input())
    desired = graphs.flat(expected.get(comm.rank, Variable(np.empty(0))))
    for y, x in zip(graphs.flat(found), desired, strict=True):
        assert_allclose(y.array, x.array, 1e-12, 1e-12)
    graphs.loss_of(found).backward()
    for pair in zip(model, mine, strict=True):
        gradients = [0 if link.w.grad is None else link.w.grad for link in pair]
        assert_allclose(*gradients, rtol=1e-12, atol=1e-12)


SIMPLE = [Part(0, None, 1), Part(1, 0, None)]
SPLIT = [Part(0, None, 1), Part(1, 0, 0), Part(0, 1, None)]
TUPLES = [Part(0, None, 1, gives=2), Part(1, 0, None)]
NON_CONNECTED_2 = [
    Part(1, None, 0),
    Part(0, 1, None),
    Part(0, None, 1),
    Part(1, 0, None),
]
UNUSED = [Part(0, None, 1), Part(1, 0, 0, uses_input=False), Part(0, 1, None)]
OWN = [Part(0, None, [0, 1]), Part(0, 0, 1), Part(1, [0, 0], None)]


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("graph", [SIMPLE, SPLIT, TUPLES, NON_CONNECTED_2, UNUSED, OWN])
def test_examples_on_two_ranks(comm, graph):
    check(comm, graph)


@pytest.mark.sizes(2, 3, 4)
@graphs.any_of(15)
def test_any_graph(comm, examples):
    graphs.check_drawn(lambda graph: check(comm, graph), comm.size, examples)


@pytest.mark.sizes(2)
@pytest.mark.parametrize("duplicate", [copy, deepcopy, methodcaller("copy", "init")])
def test_a_copy_works_beside_the_original(comm, duplicate):
    model = MultiNodeChainList(comm)
    if comm.rank == 0:
        neighbours = [(None, 1), (1, None)]
    else:
        neighbours = [(0, 0)]
    for route in neighbours:
        model.add_link(L.Linear(2, 2), *route)
    models = [model, duplicate(model)]
    for each in models:
        each.cleargrads()
    outputs = [each(np.ones((1, 2), "f")) for each in models]
    for output in reversed(outputs):
        graphs.loss_of(output).backward()
    for param in ChainList(*models).params():
        assert np.isfinite(param.grad).all()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"rank_in": 9}, ValueError, "rank_in must be an integer from 0 to"),
        ({"rank_out": 1.0}, ValueError, r"rank_out must be an integer .*got 1\.0"),
        ({"rank_in": []}, ValueError, "rank_in must not be empty"),
        ({}, ValueError, "one output"),
        ({"link": "link"}, TypeError, "a component must be a chainer.Link, got str"),
    ],
)
def test_wrong_components_are_refused_by_name(comm, wrong, error, text):
    model = MultiNodeChainList(comm)
    with pytest.raises(ValueError, match="add each component with add_link"):
        model()
    model.add_link(Chain())
    with pytest.raises(error, match=f"rank {comm.rank}: .*{text}"):
        model.add_link(**{"link": Chain(), **wrong})
    assert len(model) == 1


def test_a_list_takes_a_communicator():
    with pytest.raises(TypeError, match="comm must be a communicator, got str"):
        MultiNodeChainList("naive")


@pytest.mark.sizes(1, 2)
def test_what_goes_to_the_own_rank_must_be_received_there(comm):
    me = comm.rank
    for route, text in (
        ((None, me), f"later one has rank_in={me}"),
        ((me, None), f"earlier one has rank_out={me}"),
    ):
        model = MultiNodeChainList(comm)
        model.add_link(Component(0, 1, True), *route)
        with pytest.raises(ValueError, match=text):
            model(graphs.model_input())


@pytest.mark.sizes(2)
@pytest.mark.parametrize("ranks", [tuple, set, np.array])
def test_variables_within_the_output_lead_back_to_other_ranks(comm, ranks):
    """Also the one that doesn't depend on what was received."""
    model = MultiNodeChainList(comm)
    w = Variable(np.ones(2))
    x = Variable(np.ones(2))
    if comm.rank == 0:
        model.add_link(Sequential(F.square), rank_out=ranks([1]))
        for expected in (2, 0):
            x.cleargrad()
            model(x).backward()
            assert_array_equal(x.grad, np.full(2, expected))
    else:
        pair = namedtuple("pair", "mine others")

        def both(x):
            losses = pair([F.sum(w)], F.sum(x))
            return {"loss": losses, "n": [None, np.ones(1)]}

        give = Sequential(both)
        model.add_link(give, rank_in=ranks([0]))
        model()["loss"].others.backward()
        found = model()
        assert found["n"] == [None, np.ones(1)]
        found["loss"].mine[0].backward()
        assert_array_equal(w.grad, [1, 1])


def test_a_component_added_to_a_copy_is_not_the_originals(comm):
    model = MultiNodeChainList(comm)
    model.add_link(Sequential(F.square))
    twin = model.copy()
    twin.add_link(Sequential(F.square), comm.rank, comm.rank)
    assert_array_equal(model(np.full(2, 3, "f")).array, [9, 9])

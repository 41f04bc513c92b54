"""The norm of the gradients of models in parts equals that of the whole model."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.random import default_rng

from chainermn_comm import Sharding, global_norm
from chainermn_comm.sharding import HOST_CHUNK
from tests.support.oracles.raised import raises_on_all
from tests.support.worlds.models import Model, Param
from tests.support.worlds.third_party import PlainCommunicator

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]


def gradient(seed, *shape):
    return default_rng(seed).standard_normal(shape)


def held(grad, *shardings):
    param = Param(grad, grad)
    param.shardings = shardings  # type: ignore[attr-defined]
    return param


def norm_of(*whole):
    flat = np.concatenate([each.ravel() for each in whole])
    return float(np.linalg.norm(flat))


# In which group a rank holds a whole model together with others.
GROUPS = {
    "one group": lambda rank, size: 0,
    "halves": lambda rank, size: 2 * rank // size,
    "in turn": lambda rank, size: rank % 2,
}


@pytest.mark.parametrize("groups", GROUPS)
def test_shards_and_replicas_count_once(world, groups):
    """On any communicator."""
    comm = PlainCommunicator(world)
    color = GROUPS[groups](comm.rank, comm.size)
    group = comm.split(color, -comm.rank)
    weight = gradient(1, 6, 8)
    bias = gradient(2, 8)
    plain = gradient(3, 5)
    shard = np.array_split(weight, group.size, axis=1)[group.rank]
    model = Model(
        weight=held(shard, Sharding("shard", group)),
        bias=held(bias, Sharding("replica", group)),
        plain=Param(plain, plain),
        missing=Param(plain),
    )
    norm = global_norm(comm, model)
    assert norm == pytest.approx(norm_of(weight, bias, plain), rel=1e-14)
    assert set(comm.allgather_obj(norm)) == {norm}


@pytest.mark.parametrize("copies", [1, pytest.param(2, marks=pytest.mark.sizes(2, 4))])
def test_what_is_placed_may_have_one_name_on_all_ranks(naive, copies):
    group = naive.split(naive.rank % copies, naive.rank)
    sharding = Sharding("placed", group)
    stages = gradient(1, group.size, 4)
    model = Model(w=held(stages[group.rank], sharding))
    if group.rank == 0:
        model.params["only here"] = held(stages[0], sharding)
    expected = norm_of(stages, stages[0])
    assert global_norm(naive, model) == pytest.approx(expected, rel=1e-14)


@pytest.mark.sizes(4)
def test_a_shard_may_be_placed(naive):
    """Two stages, each on two ranks that have a half of every parameter of it."""
    shards = naive.split(naive.rank // 2, naive.rank)
    stages = naive.split(naive.rank % 2, naive.rank)
    whole = gradient(1, 4, 3)
    param = held(
        whole[naive.rank], Sharding("shard", shards), Sharding("placed", stages)
    )
    norm = global_norm(naive, Model(w=param))
    assert norm == pytest.approx(norm_of(whole), rel=1e-14)


@pytest.mark.parametrize(
    "grad",
    [
        np.full(1000, 300, "f2"),  # whose squares are no float16
        np.full(9, 1e-30, "f4"),
        gradient(1, 6, 40).T[::3] + 1j,
        np.ones((0, 3)),
        np.ones(2 * HOST_CHUNK + 1, "f4"),
    ],
)
def test_any_array_counts_in_float64(naive, grad):
    wide = grad.astype(np.result_type(grad, np.float64))
    norm = global_norm(naive, Model(w=Param(grad, grad)))
    assert norm == pytest.approx(norm_of(wide), rel=1e-13)


@pytest.mark.sizes(4)
@pytest.mark.parametrize("kind", ["shard", "placed"])
def test_a_communicator_that_lacks_parts_is_refused(naive, kind):
    parts = naive.split(naive.rank // 2, naive.rank)
    model = Model(w=held(np.ones(3), Sharding(kind, parts)))
    with pytest.raises(ValueError, match="not all ranks that hold /w in parts are"):
        global_norm(naive.split(naive.rank % 2, 0), model)


@pytest.mark.parametrize("other", [np.ones((5, 4), "f4"), np.ones((3, 4), "f2")])
def test_arrays_that_differ_are_no_replicas_though_named_alike(naive, other):
    """As of the links at the two ends of a send, whose parameters say nothing of ranks."""
    first = np.ones((3, 4), "f4")
    grad = first
    if naive.rank:
        grad = other
    model = Model(w=Param(grad, grad))
    text = (
        rf"/w is {other.dtype} {re.escape(str(other.shape))} on rank 1 and "
        r"float32 \(3, 4\) on a lower rank.*MultiNodeChainList.*shardings"
    )
    with pytest.raises(ValueError, match=text):
        global_norm(naive, model)
    model.params["w"] = held(grad, Sharding("placed", naive))
    norms = [first] + [other] * (naive.size - 1)
    assert global_norm(naive, model) == pytest.approx(norm_of(*norms))


def test_a_parameter_without_values_is_no_replica(naive):
    w = np.ones((3, 4), "f4")
    if naive.rank:
        param = Param()
    else:
        param = Param(w, w)
    model = Model(w=param)
    assert global_norm(naive, model) == pytest.approx(norm_of(w))


@pytest.mark.parametrize("call", ["bcast_data", "multi_node_mean_grad"])
def test_only_ranks_with_the_same_part_may_share_it(naive, call):
    def model_with(part):
        group = SimpleNamespace(rank=part, size=naive.size)
        sharding = Sharding("shard", group)  # type: ignore[arg-type]
        return Model(w=held(np.full(3, float(naive.rank)), sharding))

    getattr(naive, call)(model_with(1))
    model = model_with(naive.rank)
    text = r"comm\.split\): /w shard 0 of \d on rank 0; /w shard 1 of"
    with pytest.raises(ValueError, match=text):
        getattr(naive, call)(model)
    assert model["w"].data.tolist() == [naive.rank] * 3


@pytest.mark.sizes(2)
def test_a_kind_that_there_is_not_is_refused(naive):
    with pytest.raises(ValueError, match="one of shard, replica, placed, got 'column"):
        Sharding("column", naive)  # type: ignore[arg-type]


def test_an_error_on_one_rank_is_raised_on_all(naive):
    wrong = naive.rank == 1
    if wrong:
        grad = object()
    else:
        grad = np.ones(2)
    with raises_on_all(wrong, TypeError, "rank 1"):
        global_norm(naive, Model(w=Param(np.ones(2), grad)))
    assert naive.allreduce_obj(1) == naive.size

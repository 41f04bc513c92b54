"""The norm of the gradients of models in parts equals that of the whole model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chainermn_comm import (
    CommunicatorBase,
    PeerError,
    Sharding,
    global_norm,
)
from chainermn_comm.sharding import HOST_CHUNK
from tests.support.worlds.models import Model, Param
from tests.support.worlds.third_party import PlainCommunicator

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3, 4)]


def gradient(seed: int, *shape: int, dtype: str = "f8") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def held(grad: Any, *shardings: Sharding) -> Param:
    param = Param(grad, grad)
    param.shardings = shardings  # type: ignore[attr-defined]
    return param


def norm_of(*whole: np.ndarray) -> float:
    return float(np.linalg.norm(np.concatenate([each.ravel() for each in whole])))


@pytest.fixture(params=["one group", "halves", "in turn", "uneven"])
def group(naive: CommunicatorBase, request: pytest.FixtureRequest) -> CommunicatorBase:
    """A group of ranks that hold a whole model together; there may be others like it."""
    rank = naive.rank
    color = {
        "one group": 0,
        "halves": 2 * rank // naive.size,
        "in turn": rank % 2,
        "uneven": int(rank == naive.size - 1),
    }[request.param]
    return naive.split(color, -rank)


def test_shards_and_replicas_count_once(naive, group):
    weight = gradient(1, 6, 8)
    bias, plain = gradient(2, 8), gradient(3, 5)
    model = Model(
        weight=held(
            np.array_split(weight, group.size, axis=1)[group.rank],
            Sharding("shard", group),
        ),
        bias=held(bias, Sharding("replica", group)),
        plain=Param(plain, plain),
        missing=Param(plain, None),
    )
    norm = global_norm(naive, model)
    assert norm == pytest.approx(norm_of(weight, bias, plain), rel=1e-14)
    assert isinstance(norm, float)
    assert len(set(naive.allgather_obj(norm))) == 1


@pytest.mark.parametrize("copies", [1, pytest.param(2, marks=pytest.mark.sizes(2, 4))])
def test_what_is_placed_may_have_one_name_on_all_ranks(naive, copies):
    group = naive.split(naive.rank % copies, naive.rank)
    stages = [gradient(rank, 4) for rank in range(group.size)]
    model = Model(w=held(stages[group.rank], Sharding("placed", group)))
    if group.rank == 0:
        model.params["only here"] = held(stages[0], Sharding("placed", group))
    expected = norm_of(*stages, stages[0])
    assert global_norm(naive, model) == pytest.approx(expected, rel=1e-14)


@pytest.mark.sizes(4)
def test_a_shard_may_be_placed(naive):
    """Two stages, each on two ranks that have a half of every parameter of it."""
    shards = naive.split(naive.rank // 2, naive.rank)
    stages = naive.split(naive.rank % 2, naive.rank)
    whole = [gradient(number, 6) for number in range(2)]
    model = Model(
        w=held(
            np.split(whole[stages.rank], 2)[shards.rank],
            Sharding("shard", shards),
            Sharding("placed", stages),
        )
    )
    assert global_norm(naive, model) == pytest.approx(norm_of(*whole), rel=1e-14)


@pytest.mark.sizes(3)
def test_some_ranks_may_hold_no_part(naive):
    pair = naive.split(int(naive.rank == 2), naive.rank)
    whole = gradient(1, 6)
    model = Model()
    if naive.rank < 2:
        model.params["w"] = held(
            np.split(whole, 2)[naive.rank], Sharding("shard", pair)
        )
    assert global_norm(naive, model) == pytest.approx(norm_of(whole), rel=1e-14)


@pytest.mark.parametrize(
    "grad",
    [
        np.full(1000, 300, "f2"),  # whose squares are no float16
        np.full(9, 1e-30, "f4"),
        gradient(1, 4, 6).T,
        gradient(1, 40)[::3],
        gradient(1, 6) + 1j * gradient(2, 6),
        np.float32(3),
        np.zeros((0, 3)),
        np.ones(2 * HOST_CHUNK + 1, "f4"),
    ],
    ids=lambda grad: f"{grad.dtype}-{grad.shape}",
)
def test_any_array_counts_in_float64(naive, grad):
    wide = np.asarray(grad, np.result_type(grad.dtype, np.float64))
    norm = global_norm(naive, Model(w=Param(grad, grad)))
    assert norm == pytest.approx(float(np.linalg.norm(wide.ravel())), rel=1e-13)


def test_any_communicator_takes_it(world):
    comm = PlainCommunicator(world)
    model = Model(w=held(np.ones(4), Sharding("shard", comm)))
    assert global_norm(comm, model) == pytest.approx(2 * comm.size**0.5)


def test_nan_is_the_norm_on_all_ranks(naive):
    grad = np.array([np.nan if naive.rank == 1 else 1.0])
    assert np.isnan(global_norm(naive, Model(w=Param(grad, grad))))


def test_an_error_on_one_rank_is_raised_on_all(naive):
    model = Model(w=Param(None, object() if naive.rank == 1 else np.ones(2)))
    with pytest.raises(TypeError if naive.rank == 1 else PeerError, match="rank 1"):
        global_norm(naive, model)
    assert naive.allreduce_obj(1) == naive.size


@pytest.mark.sizes(4)
@pytest.mark.parametrize("kind", ["shard", "placed"])
def test_a_communicator_that_lacks_parts_is_refused(naive, kind):
    parts = naive.split(naive.rank // 2, naive.rank)
    copies = naive.split(naive.rank % 2, naive.rank)
    model = Model(w=held(np.ones(3), Sharding(kind, parts)))
    with pytest.raises(ValueError, match="not all ranks that hold /w in parts are"):
        global_norm(copies, model)


@pytest.mark.sizes(2)
def test_a_kind_that_there_is_not_is_refused(naive):
    with pytest.raises(ValueError, match="one of shard, replica, placed, got 'column"):
        Sharding("column", naive)  # type: ignore[arg-type]

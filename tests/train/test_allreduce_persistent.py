"""AllreducePersistent gives all ranks the mean of a model's persistent floats."""

from __future__ import annotations

import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, Link
from numpy.random import RandomState
from numpy.testing import assert_allclose, assert_array_equal

from chainermn_comm import RankMismatchError
from chainermn_train.extensions import AllreducePersistent

pytestmark = pytest.mark.world

MISSING = object()


class Holder(Link):
    """A link with the persistent values given."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            self.add_persistent(name, value)


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.longdouble])
def test_floats_of_every_width_are_averaged_in_place(comm, dtype):
    """Also where the sum is none in float16."""
    array = np.full((2, 3), 60000 + 64 * comm.rank, dtype).T
    values = {"scalar": array[0, 0], "number": float(comm.rank), "text": f"{comm.rank}"}
    model = Holder(array=array, empty=np.empty(0, dtype), **values)
    AllreducePersistent(Chain(a=model), comm)()
    mean = dtype(60000 + 64 * (comm.size - 1) / 2)
    assert model.array is array
    assert_array_equal(array, np.full((3, 2), mean))
    assert type(model.scalar) is dtype
    assert model.scalar == mean
    assert type(model.number) is float
    assert model.number == (comm.size - 1) / 2
    assert model.text == values["text"]  # what is no float is left alone


@pytest.mark.sizes(2, 3, 4)
def test_a_rank_that_has_had_no_examples_gets_the_mean_of_the_others(comm):
    norm = L.BatchNormalization(axis=0)
    if comm.rank:
        norm(RandomState(comm.rank).rand(8, 3).astype(np.float32))
    own = comm.allgather_obj(norm.avg_mean)
    AllreducePersistent(norm, comm)()
    assert_allclose(norm.avg_mean, np.mean(own[1:], axis=0), rtol=1e-6)
    same = comm.allgather_obj(norm.avg_mean)
    assert_array_equal(same, [same[0]] * comm.size)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros(3, np.float32), r"'float32', \(2,\)\), \('float32', \(3,\)"),
        (np.zeros(2, np.float64), r"'float32', \(2,\)\), \('float64', \(2,\)"),
        (np.zeros(2, np.int32), r"'float32', \(2,\)\), 'int32'"),
        (MISSING, r"'/b' .*'float32', \(2,\)\), 'missing'"),
    ],
)
def test_values_that_differ_are_named_on_all_ranks(comm, value, text):
    values = {"a": np.full(2, comm.rank, np.float32), "b": np.ones(2, np.float32)}
    if comm.rank == 1:
        values["b"] = value
    if values["b"] is MISSING:
        del values["b"]
    model = Holder(**values)
    with pytest.raises(RankMismatchError, match=text):
        AllreducePersistent(model, comm)()
    assert model.a.tolist() == [comm.rank, comm.rank]  # as it was


def test_what_is_no_model_is_named(naive):
    with pytest.raises(TypeError, match=r"needs a model.*not list"):
        AllreducePersistent([], naive)

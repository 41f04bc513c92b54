"""AllreducePersistent gives all ranks the mean of a model's persistent floats."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

from chainermn_comm import RankMismatchError
from chainermn_train.extensions import AllreducePersistent

pytestmark = pytest.mark.world

MISSING = object()


class Normalized(chainer.Chain):
    def __init__(self, size=3):
        super().__init__()
        with self.init_scope():
            self.norm = L.BatchNormalization(size, axis=0)
            self.out = L.Linear(3, 1)

    def __call__(self, x):
        return F.mean(self.out(self.norm(x)) ** 2)


class Holder(chainer.Link):
    """A link with the persistent values given."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            self.add_persistent(name, value)


def examples(comm, count=8):
    return (
        np.random.RandomState(comm.rank).rand(count, 3).astype(np.float32) + comm.rank
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.longdouble])
def test_floats_of_every_width_are_averaged_in_place(comm, dtype):
    """Also where the sum is none in float16."""
    array = np.full((2, 3), 60000 + 64 * comm.rank, dtype).T
    frozen = array.copy()
    frozen.flags.writeable = False
    empty = np.empty(0, dtype)
    values = {"scalar": array[0, 0], "number": float(comm.rank), "empty": empty}
    model = Holder(array=array, frozen=frozen, text=str(comm.rank), **values)
    AllreducePersistent(chainer.Chain(a=model), comm)()
    assert model.array is array
    mean = np.full((3, 2), 60000 + 64 * (comm.size - 1) / 2, dtype)
    for found in model.array, model.frozen:
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, mean)
    assert (type(model.scalar), model.scalar) == (dtype, mean[0, 0])
    assert (model.empty.dtype, model.empty.size) == (dtype, 0)
    assert (type(model.number), model.number) == (float, (comm.size - 1) / 2)
    assert model.text == str(comm.rank)  # what is no float is left alone


@pytest.mark.sizes(2, 3, 4)
def test_a_rank_that_has_had_no_examples_gets_the_mean_of_the_others(comm):
    model = Normalized(size=None)
    if comm.rank:
        model(examples(comm))
    own = comm.allgather_obj(model.norm.avg_mean)
    AllreducePersistent(model, comm)()
    np.testing.assert_allclose(model.norm.avg_mean, np.mean(own[1:], axis=0), rtol=1e-6)
    same = comm.allgather_obj(model.norm.avg_mean)
    np.testing.assert_array_equal(same, [same[0]] * comm.size)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros(3, np.float32), r"'float32', \(2,\)\), \('float32', \(3,\)"),
        (np.zeros(2, np.float64), r"'float32', \(2,\)\), \('float64', \(2,\)"),
        (7, r"'float32', \(2,\)\), 'int'"),
        (np.zeros(2, np.int32), r"'float32', \(2,\)\), 'int32'"),
        (MISSING, r"'/b' .*'float32', \(2,\)\), 'missing'"),
    ],
)
def test_values_that_differ_are_named_on_all_ranks(comm, value, text):
    model = Holder(a=np.ones(2, np.float32) * comm.rank)
    if comm.rank != 1 or value is not MISSING:
        model.add_persistent("b", value if comm.rank == 1 else np.ones(2, np.float32))
    with pytest.raises(RankMismatchError, match=text):
        AllreducePersistent(model, comm)()
    # As it was.
    np.testing.assert_array_equal(model.a, np.ones(2, np.float32) * comm.rank)


def test_what_is_no_model_is_named(naive):
    with pytest.raises(TypeError, match=r"needs a model.*not list"):
        AllreducePersistent([], naive)

"""AllreducePersistent gives all ranks the mean of a model's persistent floats."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training

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


def test_in_a_trainer_an_evaluator_sees_the_means(comm, trainer_for):
    model = Normalized()
    seen = []

    def look(_):
        seen.append(np.array([model.norm.avg_mean, model.norm.avg_var]))

    average = AllreducePersistent(model, comm)
    trainer = trainer_for(
        comm, (1, "epoch"), average, model=model, examples=examples(comm)
    )
    for priority in training.PRIORITY_WRITER + 2, training.PRIORITY_WRITER:
        trainer.extend(look, f"at {priority}", (1, "epoch"), priority)
    trainer.run()
    own, mean = seen
    everyones = comm.allgather_obj(own)
    np.testing.assert_allclose(mean, np.mean(everyones, axis=0), rtol=1e-6)
    # The same bits.
    np.testing.assert_array_equal(comm.allgather_obj(mean), [mean] * comm.size)
    assert model.norm.N == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.longdouble])
def test_floats_of_every_width_are_averaged_in_place(comm, dtype):
    """Also where the sum is none in float16."""
    mean = (comm.size - 1) / 2
    frozen = np.full(2, comm.rank, dtype)
    frozen.flags.writeable = False
    array = np.full((2, 3), 60000 + 64 * comm.rank, dtype).T
    values = {
        "array": (array, np.full((3, 2), 60000 + 64 * mean, dtype)),
        "frozen": (frozen, np.full(2, mean, dtype)),
        "zero": (np.array(comm.rank, dtype), np.array(mean, dtype)),
        "scalar": (dtype(comm.rank), dtype(mean)),
        "none": (np.empty(0, dtype), np.empty(0, dtype)),
    }
    own = {name: value for name, (value, _) in values.items()}
    model = chainer.Chain(a=Holder(**own))
    AllreducePersistent(model, comm)()
    assert model.a.array is array
    for name, (_, expected) in values.items():
        found = getattr(model.a, name)
        assert (type(found), found.dtype) == (type(expected), dtype)
        np.testing.assert_array_equal(found, expected)


def test_what_is_no_float_is_left_alone(comm):
    values = {
        "count": comm.rank,
        "counts": np.full(2, comm.rank),
        "z": np.full(2, 1j * comm.rank),
    }
    model = Holder(**values, text=str(comm.rank), nothing=None, number=float(comm.rank))
    AllreducePersistent(model, comm)()
    assert (type(model.number), model.number) == (float, (comm.size - 1) / 2)
    assert (model.count, model.text, model.nothing) == (comm.rank, str(comm.rank), None)
    np.testing.assert_array_equal(model.counts, np.full(2, comm.rank))
    np.testing.assert_array_equal(model.z, np.full(2, 1j * comm.rank))
    AllreducePersistent(L.Linear(2, 2), comm)()  # nothing persistent at all


@pytest.mark.sizes(2, 3, 4)
def test_a_rank_that_has_had_no_examples_gets_the_mean_of_the_others(comm):
    model = Normalized(size=None)
    if comm.rank:
        model(examples(comm))
    mine = None if comm.rank == 0 else model.norm.avg_mean.copy()
    AllreducePersistent(model, comm)()
    expected = np.mean(
        [each for each in comm.allgather_obj(mine) if each is not None], axis=0
    )
    np.testing.assert_allclose(model.norm.avg_mean, expected, rtol=1e-6)
    same = comm.allgather_obj(model.norm.avg_mean)
    np.testing.assert_array_equal(same, [model.norm.avg_mean] * comm.size)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            np.zeros(3, np.float32),
            r"'/b' .*float32 of shape \(2,\) on rank 0, .*\(3,\) on rank 1",
        ),
        (np.zeros(2, np.float64), r"'/b' .*float32 .* on rank 0, float64 .* on rank 1"),
        (7, r"'/b' .* int on rank 1"),
        (np.zeros(2, np.int32), r"'/b' .* int32 on rank 1"),
        (MISSING, r"'/b'.*missing on rank 1"),
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

"""AllreducePersistent gives all ranks the mean of a model's persistent floats."""

from __future__ import annotations

import copy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train.extensions import AllreducePersistent

pytestmark = pytest.mark.world


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
    return np.random.RandomState(comm.rank).rand(count, 3).astype(np.float32) + comm.rank


def test_in_a_trainer_an_evaluator_sees_the_means(comm, trainer_for):
    model = Normalized()
    trainer = trainer_for(comm, model, examples(comm), (2, "epoch"))
    own, seen = [], []

    @training.make_extension(trigger=(1, "epoch"), priority=training.PRIORITY_WRITER + 2)
    def before(_):
        own.append((model.norm.avg_mean.copy(), model.norm.avg_var.copy()))

    @training.make_extension(trigger=(1, "epoch"), priority=training.PRIORITY_WRITER)
    def evaluator(_):
        seen.append((model.norm.avg_mean.copy(), model.norm.avg_var.copy()))

    trainer.extend(evaluator)
    trainer.extend(AllreducePersistent(model, comm))
    trainer.extend(before)
    trainer.run()
    assert len(own) == len(seen) == 2
    everyones = np.array(comm.allgather_obj(own))  # rank, epoch, mean or variance, channel
    np.testing.assert_allclose(seen, everyones.mean(axis=0), rtol=1e-6)
    if comm.size > 1:
        assert not np.allclose(own, seen)
    for other in comm.allgather_obj(seen):
        np.testing.assert_array_equal(other, seen)  # the same bits
    assert model.norm.N == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_arrays_of_every_width_are_averaged_in_place(comm, dtype):
    array = np.full((2, 3), 1000 * (comm.rank + 1), dtype)
    model = chainer.Chain(
        a=Holder(x=array, zero=np.array(comm.rank, dtype), none=np.empty(0, dtype))
    )
    AllreducePersistent(model, comm)()
    assert model.a.x is array
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, np.full((2, 3), 500 * (comm.size + 1), dtype))
    np.testing.assert_array_equal(model.a.zero, np.array((comm.size - 1) / 2, dtype))


def test_a_sum_that_float16_can_not_hold_has_a_mean_all_the_same(comm):
    model = Holder(x=np.full(2, 60000, np.float16))
    AllreducePersistent(model, comm)()
    np.testing.assert_array_equal(model.x, np.full(2, 60000, np.float16))


def test_scalars_and_arrays_that_are_awkward_are_averaged(comm):
    mean = (comm.size - 1) / 2
    frozen = np.full(2, comm.rank, np.float32)
    frozen.flags.writeable = False
    model = Holder(
        number=float(comm.rank),
        scalar=np.float32(comm.rank),
        frozen=frozen,
        transposed=np.arange(6.0).reshape(2, 3).T + comm.rank,
    )
    AllreducePersistent(model, comm)()
    assert (type(model.number), model.number) == (float, mean)
    assert (type(model.scalar), model.scalar) == (np.float32, np.float32(mean))
    np.testing.assert_array_equal(model.frozen, np.full(2, mean, np.float32))
    np.testing.assert_array_equal(model.transposed, np.arange(6.0).reshape(2, 3).T + mean)


def test_all_else_is_left_alone(comm):
    values = {"count": comm.rank, "counts": np.full(2, comm.rank), "z": np.full(2, 1j * comm.rank)}
    model = Holder(**values, text=str(comm.rank), nothing=None, yes=comm.rank == 0)
    AllreducePersistent(model, comm)()
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
    expected = np.mean([each for each in comm.allgather_obj(mine) if each is not None], axis=0)
    np.testing.assert_allclose(model.norm.avg_mean, expected, rtol=1e-6)
    for other in comm.allgather_obj(model.norm.avg_mean):
        np.testing.assert_array_equal(other, model.norm.avg_mean)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.zeros(3, np.float32), r"'/b' .*float32 of shape \(2,\) on rank 0, .*\(3,\) on rank 1"),
        (np.zeros(2, np.float64), r"'/b' .*float32 .* on rank 0, float64 .* on rank 1"),
        (7, r"'/b' .* int on rank 1"),
        (np.zeros(2, np.int32), r"'/b' .* int32 on rank 1"),
    ],
)
def test_values_that_differ_are_named_on_all_ranks(comm, value, text):
    model = Holder(a=np.ones(2, np.float32) * comm.rank, b=np.ones(2, np.float32))
    if comm.rank == 1:
        model.b = value
    with pytest.raises(RankMismatchError, match=text):
        AllreducePersistent(model, comm)()
    np.testing.assert_array_equal(model.a, np.ones(2, np.float32) * comm.rank)  # as it was


@pytest.mark.sizes(2, 3, 4)
def test_a_value_that_only_some_ranks_have_is_named_on_all_ranks(comm):
    model = Holder(a=np.ones(2), **({"extra": 1.0} if comm.rank == 0 else {}))
    with pytest.raises(RankMismatchError, match=r"'/extra'.*missing on rank 1"):
        AllreducePersistent(model, comm)()


@pytest.mark.sizes(2, 3, 4)
def test_an_error_on_one_rank_is_raised_on_all(comm):
    model = Holder(a=1.0)
    if comm.rank == 1:
        del model.__dict__["a"]
    with pytest.raises(AttributeError if comm.rank == 1 else PeerError):
        AllreducePersistent(model, comm)()


def test_a_copy_has_the_same_communicator_and_a_model_of_its_own(comm):
    extension = AllreducePersistent(Holder(x=float(comm.rank)), comm)
    twin = copy.deepcopy(extension)
    twin()
    assert twin.comm is comm
    assert twin.model.x == (comm.size - 1) / 2
    assert extension.model.x == comm.rank


def test_wrong_arguments_are_named(naive):
    with pytest.raises(TypeError, match=r"AllreducePersistent needs a communicator.*not NoneType"):
        AllreducePersistent(Normalized(), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"needs a model.*not list"):
        AllreducePersistent([], naive)

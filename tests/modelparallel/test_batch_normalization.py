"""`MultiNodeBatchNormalization` on parts of a batch, against `BatchNormalization` on all of it."""

from __future__ import annotations

import itertools
from functools import partial

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Variable, using_config
from numpy.testing import assert_allclose, assert_array_equal

from chainermn_comm import RankMismatchError
from chainermn_modelparallel import MultiNodeBatchNormalization
from tests.support.oracles.raised import raises_on_all
from tests.support.plugins.pairwise import tiered
from tests.support.worlds.third_party import WITH_THIRD_PARTY

pytestmark = pytest.mark.world

# How many examples each rank has.
SHARDS = {
    "even": (3, 3, 3, 3),
    "uneven": (5, 1, 3, 2),
    "first empty": (0, 4, 1, 3),
    "last empty": (2, 0, 3, 0),
    "one in all": (1, 0, 0, 0),
}
# Shape of an example, number of channels, axes that are averaged over.
FORMS = {
    "vectors": ((4,), 4, None),
    "images": ((3, 2, 5), 3, None),
    "channels of two axes": ((3, 2, 2), (3, 2), None),
    "channels last": ((2, 5, 3), None, (0, 1, 2)),
}
TOLERANCE = {np.float16: 5e-3, np.float32: 2e-5, np.float64: 1e-12}

COMBINATIONS = [
    *itertools.product(SHARDS, FORMS, [np.float64]),
    *itertools.product(["uneven", "first empty"], ["images"], [np.float16, np.float32]),
]
# Each way to share a batch and each form once, for what the first derivatives don't
# tell.
ONCE = [*zip(SHARDS, [*FORMS, "images"], strict=True)]


class Both:
    """The link on this rank's part, and Chainer's on the whole batch, from the same numbers."""

    def __init__(self, comm, random, shards, form, dtype, **options):
        shape, size, axis = FORMS[form]
        counts = SHARDS[shards][: comm.size]
        # Chainer's own fails with nothing at all.
        if any(counts):
            counts = counts
        else:
            counts = (2,)
        ends = np.cumsum(counts)
        self.mine = slice(ends[comm.rank] - counts[comm.rank], ends[comm.rank])
        self.comm = comm
        self.dtype = dtype
        self.data = (random.standard_normal((ends[-1], *shape)) * 3 + 5).astype(dtype)
        self.weights = random.standard_normal((ends[-1], *shape)).astype(dtype)
        self.channels = channels = size if axis is None else 3
        # The reference of float16 is computed in float32.
        self.wide = np.dtype(np.float32 if dtype == np.float16 else dtype)
        options |= {"axis": axis, "dtype": self.wide}
        options["initial_gamma"] = random.uniform(0.5, 2, channels).astype(self.wide)
        options["initial_beta"] = random.standard_normal(channels).astype(self.wide)
        self.alone = L.BatchNormalization(size, **options)
        self.link = MultiNodeBatchNormalization(size, comm, **options)
        self.part = self.data[self.mine]

    def total(self, array):
        """The sum over ranks, by way of pickles."""
        rows = self.comm.allgather_obj(array)
        return sum(row.astype(self.wide) for row in rows)

    def close(self, actual, desired):
        """Equal but for rounding, of the largest values too: sums contain them."""
        largest = np.abs(desired).max(initial=0)
        tolerance = TOLERANCE[self.dtype] * max(1, largest)
        assert_allclose(actual, desired, rtol=TOLERANCE[self.dtype], atol=tolerance)


# Chainer's own link.
@pytest.mark.filterwarnings("ignore:A batch with no more than one sample")
@pytest.mark.parametrize(("shards", "form", "dtype"), COMBINATIONS)
def test_parts_give_what_the_whole_batch_gives(comm, random, shards, form, dtype):
    both = Both(comm, random, shards, form, dtype)
    for _ in range(2):  # twice, for the running statistics
        both.alone.cleargrads()
        both.link.cleargrads()
        x = Variable(both.data.astype(both.wide))
        w = both.weights.astype(both.wide)
        y = both.alone(x)
        F.sum(y * y * w).backward()
        mine = Variable(both.part)
        z = both.link(mine)
        weighted = z * z * both.weights[both.mine]
        F.sum(F.cast(weighted, both.wide)).backward()
        assert z.dtype == dtype
        assert mine.grad.dtype == dtype
        both.close(z.array, y.array[both.mine])
        both.close(mine.grad, x.grad[both.mine])
        for ours, theirs in zip(both.link.params(), both.alone.params(), strict=True):
            both.close(both.total(ours.grad), theirs.grad)
        both.close(both.link.avg_mean, both.alone.avg_mean)
        both.close(both.link.avg_var, both.alone.avg_var)
    with using_config("train", False):
        y = both.alone(both.data.astype(both.wide))
        found = both.link(both.part).array
        both.close(found, y.array[both.mine])


@pytest.mark.filterwarnings("ignore:A batch with no more than one sample")
@pytest.mark.parametrize(("shards", "form"), tiered(ONCE, SHARDS, FORMS))
def test_second_derivatives_are_those_of_the_whole_batch(comm, random, shards, form):
    both = Both(comm, random, shards, form, np.float64, eps=1e-3)
    v = random.standard_normal(both.channels)
    x = Variable(both.data)
    mine = Variable(both.part)
    for link, variable, weights in (
        (both.alone, x, both.weights),
        (both.link, mine, both.weights[both.mine]),
    ):
        link.cleargrads()
        loss = F.sum(link(variable) ** 3 * weights)
        inputs = [variable, link.gamma, link.beta]
        gx, *others = chainer.grad([loss], inputs, enable_double_backprop=True)
        loss = F.sum(F.sin(gx * 0.1)) + sum(F.sum(each * v) for each in others)
        loss.backward()
    both.close(mine.grad, x.grad[both.mine])
    for ours, theirs in zip(both.link.params(), both.alone.params(), strict=True):
        if theirs.grad is not None:
            both.close(both.total(ours.grad), theirs.grad)


@WITH_THIRD_PARTY
def test_a_batch_that_is_empty_on_all_ranks_changes_nothing(comm):
    link = MultiNodeBatchNormalization(3, comm)
    link.cleargrads()
    x = Variable(np.zeros((0, 3, 2), "f"))
    F.sum(link(x)).backward()
    assert x.grad.shape == (0, 3, 2)
    assert_array_equal(link.gamma.grad, np.zeros(3))
    assert_array_equal([link.avg_mean, link.avg_var], [[0] * 3, [1] * 3])


@pytest.mark.parametrize(
    ("dtype", "mean", "scale", "tolerance"),
    [(np.float32, 10_000, 0.01, 0.1), (np.float16, 0, 1000, 2e-3)],
)
def test_digits_are_kept(comm, random, dtype, mean, scale, tolerance):
    """Sums of squares would lose 1e4 squared beside 1e-4, and overflow float16."""
    data = random.standard_normal((comm.size, 8, 2)) * scale + mean
    x = Variable(data.astype(dtype)[comm.rank])
    link = MultiNodeBatchNormalization(2, comm, eps=1e-12, dtype=dtype)
    with np.errstate(over="ignore"):  # in the running variance, if that is float16
        y = link(x)
    F.sum(y * y).backward()
    assert y.dtype == x.grad.dtype == link.gamma.grad.dtype == dtype
    wide = data.astype(dtype).astype(np.float64)
    deviation = wide.std((0, 1))
    expected = (wide - wide.mean((0, 1))) / deviation
    assert_allclose(y.array, expected[comm.rank], atol=tolerance)
    if dtype == np.float32:
        unbiased = wide.reshape(-1, 2).var(0, ddof=1)
        assert_allclose((link.avg_var - 0.9) / 0.1, unbiased, atol=1e-5)


def test_data_needs_no_exchange_in_backward(comm, random):
    """The first layer of a model: only the parameters have gradients, from this rank's part."""
    both = Both(comm, random, "even", "vectors", np.float32)
    y = both.link(both.part)
    before = comm.allgather_obj(None)
    if comm.rank == 0:  # alone: would hang if it asked the others
        F.sum(y * y).backward()
        assert both.link.gamma.grad is not None
    assert comm.allgather_obj(None) == before


def test_an_input_that_needs_a_gradient_on_one_rank_is_enough(comm, random):
    """The others take part in backward, even with nothing of their own that needs one."""
    unused = {"use_gamma": False, "use_beta": False}
    both = Both(comm, random, "even", "vectors", np.float64, **unused)
    x = Variable(both.data)
    mine = Variable(both.part, requires_grad=comm.rank == 0)
    F.sum(both.alone(x) ** 3).backward()
    F.sum(both.link(mine) ** 3).backward()
    if comm.rank == 0:
        both.close(mine.grad, x.grad[both.mine])
    else:
        assert mine.grad is None


@WITH_THIRD_PARTY
def test_running_statistics_are_chainers_and_the_same_bits_on_all_ranks(comm, random):
    """Finetuned with equal weights, and not moved when a graph is computed again."""
    both = Both(comm, random, "uneven", "vectors", np.float64)
    for factor, finetune in enumerate((True, True, False), start=1):
        both.alone(factor * both.data, finetune=finetune)
        link = partial(both.link, finetune=finetune)
        y = F.forget(link, Variable(factor * both.part))
        F.sum(y).backward()
    assert both.link.N == 2
    statistics = [both.link.avg_mean, both.link.avg_var]
    both.close(statistics, [both.alone.avg_mean, both.alone.avg_var])
    found = len(set(comm.allgather_obj(np.array(statistics).tobytes())))
    assert found == 1


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (np.ones((2, 3), int), TypeError, "must be an array of floats"),
        (np.ones((2, 4), "f"), ValueError, r"x of shape \(2, 4\)"),
    ],
)
def test_a_wrong_input_on_one_rank_raises_on_all(comm, wrong, error, text):
    link = MultiNodeBatchNormalization(3, comm)
    right = np.ones((2, 3), "f")
    x = right
    if comm.rank == 0:
        x = wrong
    with raises_on_all(comm.rank == 0, error, "rank 0.*" + text):
        link(x)
    assert_array_equal(link.avg_var, np.ones(3))
    link(right)


@pytest.mark.sizes(2, 3, 4)
def test_ranks_that_differ_raise_on_all(comm):
    channels = MultiNodeBatchNormalization(3 + (comm.rank == 1), comm)
    text = r"\(3,\) on ranks? 0.*; float32 \(4,\) on ranks? 1"
    with pytest.raises(RankMismatchError, match=text):
        channels(np.ones((2, channels.avg_mean.size), "f"))
    link = MultiNodeBatchNormalization(3, comm)
    x = Variable(np.ones((2, 3), "f"))
    losses = [F.sum(link(x)), F.sum(link(x))]
    with pytest.raises(RankMismatchError, match="disagree on the call"):
        losses[comm.rank == 0].backward()


def test_an_unknown_backend_and_communicator_are_refused(comm):
    with pytest.raises(ValueError, match="auto, mpi, nccl, got 'gloo'"):
        MultiNodeBatchNormalization(3, comm, communication_backend="gloo")
    with pytest.raises(TypeError, match="comm must be a communicator"):
        MultiNodeBatchNormalization(3, None)


@pytest.mark.parametrize("dtype", [None, np.float16, np.float64, chainer.mixed16])
@pytest.mark.parametrize("setting", [None, np.float16, np.float64, chainer.mixed16])
def test_dtypes_are_those_of_chainers_own_link(comm, dtype, setting):
    with using_config("dtype", setting or np.float32):
        ours = MultiNodeBatchNormalization(3, comm, dtype=dtype)
        chainers = L.BatchNormalization(3, dtype=dtype)
    for name in ("gamma", "avg_mean"):
        assert getattr(ours, name).dtype == getattr(chainers, name).dtype


def test_a_wrong_first_input_leaves_a_lazy_link_as_it_was(comm):
    link = MultiNodeBatchNormalization(None, comm, axis=(0, 2, 3))
    with pytest.raises(
        ValueError, match=f"rank {comm.rank}: x of shape .* doesn't have the channels"
    ):
        link(np.ones((4, 3), "f"))
    assert link.avg_mean is None
    assert link(np.ones((4, 3, 2, 2), "f")).shape == (4, 3, 2, 2)

"""Training on several ranks equals training in one process on all their examples."""

from __future__ import annotations

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.optimizer_hooks import GradientClipping, WeightDecay

from chainermn_train import create_multi_node_optimizer
from tests.support.plugins.pairwise import pairwise
from tests.support.training.trainers import assert_near, same_everywhere

pytestmark = pytest.mark.world

UPDATES = 8
BATCH = 20
CLIPPED_NORM = 0.05  # less than any of the gradients' norms: clipping acts
OPTIMIZERS = {
    "sgd": lambda: chainer.optimizers.SGD(lr=0.1),
    "momentum": lambda: chainer.optimizers.MomentumSGD(lr=0.1),
    "adam": lambda: chainer.optimizers.Adam(),
}
TOLERANCES = {np.float64: 1e-10, np.float32: 1e-5}


def classifier(seed, lazy=False):
    """A small network; lazy weights follow from the random state when they are first used."""
    np.random.seed(seed)
    inputs = (None, None) if lazy else (6, 12)
    return L.Classifier(
        chainer.Sequential(L.Linear(inputs[0], 12), F.tanh, L.Linear(inputs[1], 4))
    )


def batches(ranks, count):
    """`count` batches of BATCH examples for each of `ranks`."""
    random, size = np.random.RandomState(7), ranks * BATCH
    x = random.uniform(-1, 1, (count, size, 6)).astype(chainer.config.dtype)
    return list(
        zip(x, random.randint(0, 4, (count, size)).astype(np.int32), strict=True)
    )


def add_hooks(optimizer):
    optimizer.add_hook(WeightDecay(1e-3))
    optimizer.add_hook(GradientClipping(CLIPPED_NORM))


def norm_of_gradients(model):
    return np.sqrt(
        sum(np.sum(np.square(param.grad, dtype=float)) for param in model.params())
    )


def assert_equal(model, expected, tolerance, comm):
    assert_near(model, expected, tolerance)
    assert same_everywhere(comm, model)


@pairwise(kind=OPTIMIZERS, dtype=TOLERANCES, lazy=[False, True])
def test_updates_equal_those_of_one_process(comm, kind, dtype, lazy):
    """Lazily initialised links start one update later."""
    with chainer.using_config("dtype", np.dtype(dtype)):
        model, expected = classifier(comm.rank, lazy), classifier(0, lazy)
        optimizer = create_multi_node_optimizer(OPTIMIZERS[kind](), comm).setup(model)
        single = OPTIMIZERS[kind]().setup(expected)
        add_hooks(optimizer)
        add_hooks(single)
        mine = slice(comm.rank * BATCH, (comm.rank + 1) * BATCH)
        first, *others = batches(comm.size, UPDATES + 1)
        if lazy:  # each rank draws its weights when it first sees examples
            np.random.seed(comm.rank)
            optimizer.update(model, first[0][:BATCH], first[1][:BATCH])
            np.random.seed(0)
            expected.predictor(first[0])
            assert optimizer.t == 0
            assert_equal(model, expected, 0, comm)
        for number, (x, t) in enumerate(others, start=1):
            optimizer.update(model, x[mine], t[mine])
            single.update(expected, x, t)
            assert optimizer.t == single.t == number
            assert_equal(model, expected, TOLERANCES[dtype], comm)
            assert norm_of_gradients(model) == pytest.approx(CLIPPED_NORM, rel=1e-4)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("without", [0, -1])
def test_a_rank_without_examples_gets_the_parameters_and_counts_as_zeros(comm, without):
    """It never learns the shapes of its lazily initialised links by itself."""
    idle = without % comm.size
    with chainer.using_config("dtype", np.dtype(np.float64)):
        model = classifier(seed=comm.rank, lazy=True)
        optimizer = create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(
            model
        )
        expected, single = model.copy(), chainer.optimizers.Adam()
        begin = BATCH * (comm.rank - (comm.rank > idle))
        for x, t in batches(comm.size - 1, 5):
            if comm.rank == idle:
                model.cleargrads()
                optimizer.update()
            else:
                optimizer.update(model, x[begin:][:BATCH], t[begin:][:BATCH])
            if optimizer.t == 0:
                expected = model.copy("copy")
                single.setup(expected)
            else:
                expected.cleargrads()
                (expected(x, t) * ((comm.size - 1) / comm.size)).backward()
                single.update()
            assert all(param.is_initialized for param in model.params())
            assert_equal(model, expected, 1e-10, comm)
        assert optimizer.t == 4


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize(("idle", "gamma"), [(0, 1), (-1, 1), (-1, 3)])
def test_a_lazy_batch_normalization_does_not_begin_anew_where_examples_come_later(
    naive, idle, gamma
):
    """Chainer's makes its parameters anew when it makes its statistics; rank 0 may have some."""
    norm = L.BatchNormalization(axis=0)
    model = L.Classifier(chainer.Sequential(norm, L.Linear(6, 4)))
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(lr=0.5), naive
    ).setup(model)
    if gamma != 1:
        if naive.rank == 0:
            norm(np.ones((2, 6), np.float32))
            norm.gamma.array[:] = gamma
        naive.bcast_data(model)  # brings no statistics
    for number, (x, t) in enumerate(batches(1, 6)):
        if naive.rank == idle % naive.size and number < 3:
            model.cleargrads()
            optimizer.update()
        else:
            optimizer.update(model, x, t)
        if number == 2:
            with chainer.using_config("train", False):
                model(x, t)
        assert norm.avg_mean.shape == norm.avg_var.shape == (6,)
        assert same_everywhere(naive, model)
    # As given at first on all ranks, which all go on from there together.
    assert (norm.gamma.array != gamma).all()
    assert np.abs(norm.gamma.array - gamma).max() < 0.5


def test_chainers_own_update_is_followed_in_half_precision_with_loss_scaling(naive):
    """One rank's batch on all ranks: the mean is the gradient of one process, bit by bit."""
    with chainer.using_config("dtype", np.dtype(np.float16)):
        networks = []
        for wrap in (lambda o: create_multi_node_optimizer(o, naive)), (lambda o: o):
            model = classifier(seed=0)
            optimizer = wrap(chainer.optimizers.Adam(eps=1e-4))
            optimizer.use_fp32_update()
            optimizer.setup(model)
            optimizer.loss_scaling(interval=2)
            for x, t in batches(1, 6):
                optimizer.update(model, x, t)
            networks.append((model, optimizer._loss_scale, optimizer.t))
    (mine, *state), (expected, *other_state) = networks
    assert state == other_state
    assert state[0] > 1
    assert_equal(mine, expected, 0, naive)

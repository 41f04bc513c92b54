"""What users see of gradients after an update, however these are exchanged."""

from __future__ import annotations

import chainer.links as L
import numpy as np
import pytest
from chainer import Sequential
from chainer.optimizers import SGD

from tests.support.training.exchanges import (
    HIERARCHICAL,
    KINDS,
    WHOLE_KINDS,
    exchanging,
)
from tests.support.training.over_ranks import CLASSES, WIDTH, Tied, batch, lazy
from tests.support.training.trainers import same_everywhere

pytestmark = pytest.mark.world

each_kind = pytest.mark.parametrize("kind", KINDS)


@HIERARCHICAL
@pytest.mark.parametrize("kind", WHOLE_KINDS)
def test_hooks_see_zeros_for_what_is_not_updated(comm, kind):
    """Its gradients stay on their rank."""
    model = Tied()
    optimizer = exchanging(kind, comm, SGD(0.2), model)
    seen = []

    def look(_):
        seen.append(model.encoder.W.grad.any())

    optimizer.add_hook(look, "look")
    model.encoder.disable_update()
    for number in range(4):
        optimizer.update(model, *batch(comm.rank, number))
    assert set(seen) == {False}
    optimizer.finalize()


@HIERARCHICAL
@each_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_parameters_hold_gradients_after_every_update(comm, kind, steps):
    """Extensions such as ParameterStatistics look at these."""
    model = lazy()
    optimizer = exchanging(kind, comm, SGD(lr=0.1), model, steps)
    for number in range(7):
        optimizer.update(model, *batch(comm.rank, number))
        for name, param in model.namedparams():
            assert param.grad.any(), (number, name)
    optimizer.finalize()


@pytest.mark.sizes(2, 3, 4)
def test_a_lazy_batch_normalization_does_not_begin_anew_where_examples_come_later(
    naive,
):
    """Chainer's makes its parameters anew when it makes its statistics."""
    norm = L.BatchNormalization(axis=0)
    model = L.Classifier(Sequential(norm, L.Linear(WIDTH, CLASSES)))
    optimizer = exchanging("synchronous", naive, SGD(0.1), model)
    if naive.rank == 0:
        norm(np.ones((2, WIDTH), np.float32))
        norm.gamma.array[:] = 3
    naive.bcast_data(model)  # brings no statistics
    for number in range(6):
        model.cleargrads()
        if naive.rank == 0 or number > 2:
            model(*batch(0, number)).backward()
        optimizer.update()
        assert norm.avg_mean.shape == norm.avg_var.shape == (WIDTH,)
        assert same_everywhere(naive, model)
    # All go on together from what was given.
    assert np.abs(norm.gamma.array - 3).max() < 0.5

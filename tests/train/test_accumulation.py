"""With accumulate_steps=k, k updates equal one of the large batch."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from chainer import Parameter, using_config
from chainer.optimizers import SGD
from chainer.serializers import DictionarySerializer, NpzDeserializer
from numpy.testing import assert_array_equal

from chainermn_train import create_multi_node_optimizer
from chainermn_train.optimizers import accumulation
from tests.support.training.small_models import TanhNet, batch_of
from tests.support.training.trainers import assert_near, load_state, state_of

pytestmark = pytest.mark.world

WIDTH = 7

net = partial(TanhNet, n_in=WIDTH, width=6)
batch = partial(batch_of, width=WIDTH)


def accumulating(comm, model, steps, lr=0.5):
    sgd = SGD(lr)
    optimizer = create_multi_node_optimizer(sgd, comm, accumulate_steps=steps)
    optimizer.setup(model).assume_synchronized()
    return optimizer


@pytest.mark.sizes(2, 3, 4)
def test_a_last_step_of_more_updates_on_some_ranks_counts_each_once(
    comm, double_precision
):
    """Rank r has r + 1 updates left."""
    model = net(0)
    expected = net(0)
    optimizer = accumulating(comm, model, 6)
    for number in range(comm.rank + 1):  # the first of an accumulation is collective
        optimizer.update(model, batch(comm.rank, number))
    optimizer.flush()
    batches = [batch(rank, n) for rank in range(comm.size) for n in range(rank + 1)]
    single = SGD(0.5).setup(expected)
    single.update(expected, np.concatenate(batches))
    assert optimizer.t == 1
    assert_near(model, expected, 1e-12)


def test_sixteen_bit_gradients_are_added_in_float32(naive):
    """Their sum would be infinite, their mean is not."""
    with using_config("dtype", np.dtype("float16")):
        model = net(0)
        optimizer = accumulating(naive, model, 4, lr=2.0**-10)
        model.first.b.array[...] = 0
        for _ in range(4):
            model.cleargrads()
            model.first.b.grad = np.full(6, 40000, np.float16)
            optimizer.update()
        expected = np.float16(40000) * np.float16(-(2.0**-10))
        assert_array_equal(model.first.b.array, expected)


# Saving and loading.


def test_sums_that_belong_elsewhere_are_refused(naive):
    """Those of a job of other ranks, and those of more updates than make a step."""
    alone = naive.split(naive.rank, 0)
    optimizer = accumulating(naive, net(0), 4)
    for updates in 1, 2, 3, 4:
        optimizer.update(optimizer.target, batch(0, 0))
        state = state_of(optimizer)
        if updates == 3:
            with pytest.raises(ValueError, match="gradients of 3 updates"):
                load_state(accumulating(naive, net(0), 3), state)
        other = accumulating(alone, net(0), 4)
        if updates < 4 and naive.size > 1:
            words = f"rank {naive.rank} of {naive.size} added"
            with pytest.raises(ValueError, match=words):
                load_state(other, state)
        else:  # after a step there is nothing that belongs to a rank
            load_state(other, state)
            assert other.t == optimizer.t


def test_sums_of_a_snapshot_go_to_the_device_of_the_parameter(monkeypatch):
    class ElsewhereArray(np.ndarray):
        """A double of a GPU's array."""

    model = net(0)
    for param in model.params():
        param.grad = np.ones_like(param.array)
    saved = accumulation.Accumulation(4)
    resumed = accumulation.Accumulation(4)
    saved.num_calls = 1
    saved.add(accumulation.ParameterSet(model), 1)
    state = DictionarySerializer()
    saved.serialize(state, model, 0, 1)
    device = SimpleNamespace(send=lambda array: array.view(ElsewhereArray))
    monkeypatch.setattr(Parameter, "device", device)
    reader = NpzDeserializer(state.target)
    resumed.serialize(reader, model, 0, 1)
    grads = [each.grad for each in resumed.sums.gradients]
    for grad in grads:
        assert isinstance(grad, ElsewhereArray)
    assert resumed.num_accumulated == 1

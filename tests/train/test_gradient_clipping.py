"""Clipping of models in parts: no part steps alone, and hooks that see one part are refused."""

from __future__ import annotations

import io
from contextlib import nullcontext

import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.optimizer_hooks import GradientClipping, GradientLARS
from chainer.optimizers import SGD
from chainer.serializers import load_npz, save_npz
from numpy.testing import assert_allclose

from chainermn_comm import PeerError, RankMismatchError, Sharding
from chainermn_modelparallel import (
    MultiNodeChainList,
    share_loss_scale,
)
from chainermn_train import MultiNodeGradientClipping, create_multi_node_optimizer
from tests.support.oracles.raised import raises_on_all
from tests.support.plugins.pairwise import pairwise
from tests.support.training.over_ranks import (
    batch,
    in_pairs,
    parallel_layers,
    two_layers,
)

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 4)]

THRESHOLD = 0.01  # less than the norm of each update


def load(optimizer):
    snapshot = io.BytesIO()
    save_npz(snapshot, optimizer)
    snapshot.seek(0)
    load_npz(snapshot, optimizer)


def load_before_update(optimizer, loss):
    """Ranks share the state before the loss, and the update counts."""
    load(optimizer)
    optimizer.update(loss)


def load_with_gradients(optimizer, loss):
    """Nobody steps along gradients that an update finds there after a load."""
    load(optimizer)
    optimizer.update()


KINDS = {
    "plain": {},
    "double_buffering": {"double_buffering": True},
    "overlap": {"overlap": True},
    "accumulate_steps": {"accumulate_steps": 2},
}


def fail(*_):
    raise OSError("no batch")


def clip(optimizer, comm):
    optimizer.add_hook(MultiNodeGradientClipping(THRESHOLD, comm))


def scale(optimizer, comm):
    optimizer.loss_scaling()
    share_loss_scale(optimizer, comm)


def clip_and_scale(optimizer, comm):
    clip(optimizer, comm)
    scale(optimizer, comm)


@pytest.fixture
def hooked(naive):
    """Makes an optimizer over the ranks with the same part, and its loss."""

    def make(add_hooks=clip, **options):
        np.random.seed(0)
        model = L.Linear(2, 2)
        pair = in_pairs(naive)
        model.W.shardings = (Sharding("shard", pair.model),)
        optimizer = create_multi_node_optimizer(SGD(), pair.mean, **options)
        optimizer.setup(model)
        add_hooks(optimizer, naive)

        def loss():
            return F.sum(model(np.ones((1, 2), "f4")))

        return optimizer, loss

    return make


@pairwise(
    kind=KINDS,
    add_hooks=[clip, scale, clip_and_scale],
    number=[2, 3],
    load=[load_before_update, load_with_gradients],
)
def test_no_rank_of_a_model_steps_where_some_do_not(
    naive, hooked, kind, add_hooks, number, load
):
    """The ranks of one optimizer load a state; those of the other one wait in the hook."""
    optimizer, loss = hooked(add_hooks, **KINDS[kind])
    for _ in range(number):
        optimizer.update(loss)
    steps = optimizer.t
    if naive.rank % 2 == 0:
        load(optimizer, loss)
    else:
        optimizer.update(loss)
    assert len(set(naive.allgather_obj(optimizer.t))) == 1
    for _ in range(6):
        optimizer.update(loss)
    assert optimizer.t > steps
    assert len(set(naive.allgather_obj(optimizer.t))) == 1
    optimizer.flush()
    assert len(set(naive.allgather_obj(optimizer.t))) == 1


def test_an_error_waits_for_no_rank_of_a_clipping_hook(naive, hooked):
    optimizer, loss = hooked()
    optimizer.update(loss)

    if naive.rank % 2 == 0:
        with pytest.raises(OSError, match="no batch"):
            optimizer.update(fail)


def test_a_failed_hook_before_a_clipping_hook_raises_on_all_ranks(naive):
    """The next update gives rank 0's state to all, and all go on."""
    model = two_layers()
    optimizer = create_multi_node_optimizer(SGD(), naive).setup(model)
    if naive.rank == 1:
        optimizer.add_hook(fail, "fail")
    clip(optimizer, naive)
    examples = batch(0, 0)
    with raises_on_all(naive.rank == 1, OSError, "no batch"):
        optimizer.update(model, *examples)
    if naive.rank == 1:
        optimizer.remove_hook("fail")
    for _ in range(2):
        optimizer.update(model, *examples)
    assert naive.allgather_obj(optimizer.t) == [1] * naive.size


def test_parts_of_a_model_that_have_made_other_steps_are_told(naive, hooked):
    """As where some ranks have loaded an older checkpoint."""
    optimizer, loss = hooked()
    optimizer.update(loss)
    if naive.rank % 2 == 0:
        optimizer.t = 5
    with pytest.raises(RankMismatchError, match="load the same checkpoint on all"):
        optimizer.update(loss)
    assert optimizer.t == [5, 1][naive.rank % 2]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [0.1, 1, np.nan, np.inf])
def test_gradients_of_a_whole_model_are_what_chainer_makes_of_them(naive, value):
    """Also where the norm is below the threshold, or no finite number."""
    found = []
    for hook in GradientClipping(1.0), MultiNodeGradientClipping(1.0, naive):
        model = L.Linear(2, 2)
        optimizer = SGD().setup(model)
        model.W.grad = np.full((2, 2), value, "f4")
        model.b.grad = np.full(2, 0.1, "f4")
        hook(optimizer)
        found.append([*model.W.grad, model.b.grad])
    assert_allclose(*found, rtol=1e-6)
    model.cleargrads()
    hook(optimizer)
    assert model.W.grad is None


@pytest.mark.parametrize(
    ("hook", "of_rule", "timing"),
    [
        (GradientClipping(1.0), False, "auto"),
        (GradientClipping(1.0), False, "post"),
        (GradientLARS(), False, "auto"),
        (GradientLARS(), True, "auto"),
    ],
)
def test_hooks_by_the_norm_of_a_part_are_refused(naive, hook, of_rule, timing):
    """Added on one rank, the hook is an error on all ranks."""
    pair = in_pairs(naive)
    model = parallel_layers(pair.model)
    optimizer = create_multi_node_optimizer(SGD(), pair.mean)
    optimizer.setup(model)
    owner = optimizer
    if of_rule:
        owner = model.first.W.update_rule
    if pair.mean.rank == 0:
        owner.add_hook(hook, timing=timing)
    text = r"chainermn\.MultiNodeGradientClipping"
    with raises_on_all(pair.mean.rank == 0, ValueError, text):
        optimizer.update(model, *batch(0, 0))
    if pair.mean.rank == 0:
        owner.remove_hook(hook.name)
    optimizer.synchronize()  # no rank of the model has made the update
    optimizer.update(model, *batch(0, 0))


def test_hooks_by_norm_stay_on_models_that_ranks_hold_whole(naive):
    """Also where a rank divides a model with itself alone."""
    alone = naive.split(naive.rank, 0)
    model = parallel_layers(alone)
    optimizer = create_multi_node_optimizer(SGD(), naive)
    optimizer.setup(model)
    optimizer.add_hook(GradientClipping(1.0))
    optimizer.add_hook(GradientLARS())
    model.last.b.shardings = (Sharding("replica", naive),)
    optimizer.update(model, *batch(0, 0))
    assert optimizer.t == 1


def test_parallel_links_tell_of_ranks_that_made_other_steps(naive):
    """Rank 0's state goes to all ranks of one optimizer; those of the other one step."""
    pair = in_pairs(naive)
    model = parallel_layers(pair.model)
    optimizer = create_multi_node_optimizer(SGD(), pair.mean)
    optimizer.setup(model)
    examples = batch(0, 0)
    optimizer.update(model, *examples)
    model.cleargrads()
    model(*examples).backward()
    if naive.rank % 2 == 0:
        load(optimizer)
    optimizer.update()
    with pytest.raises(RankMismatchError, match="steps of its parameters"):
        optimizer.update(model, *examples)


@pytest.mark.parametrize("steps", [1, 3])
def test_no_update_follows_one_that_failed_for_a_part_of_a_model(naive, hooked, steps):
    """Ranks with the other part may wait for messages of the update that failed."""
    optimizer, loss = hooked(lambda *_: None, accumulate_steps=steps)
    for _ in range(steps + steps // 2):
        optimizer.update(loss)

    if naive.rank == 0:
        with pytest.raises(OSError, match="no batch"):
            optimizer.update(fail)
    elif naive.rank == 2:
        if steps == 1:
            raised = pytest.raises(PeerError)
        else:
            raised = nullcontext()
        with raised:
            optimizer.update(loss)
    if naive.rank % 2 == 0:
        for _ in range(2):
            with pytest.raises((RuntimeError, PeerError), match="load a checkpoint"):
                optimizer.update(loss)
    optimizer.synchronize()
    optimizer.update(loss)


def test_no_loss_follows_a_flush_that_failed_for_a_part_of_a_model(hooked):
    optimizer, loss = hooked(lambda *_: None, accumulate_steps=2)
    for _ in range(3):
        optimizer.update(loss)
    optimizer.add_hook(fail, "fail")
    with pytest.raises(OSError, match="no batch"):
        optimizer.flush()
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        optimizer.update(fail)


def test_a_first_update_that_failed_for_a_lazy_part_counts_as_well(naive):
    pair = in_pairs(naive)
    model = MultiNodeChainList(pair.model)
    model.add_link(L.Linear(None, 2), rank_out=1 - pair.model.rank)
    optimizer = create_multi_node_optimizer(SGD(), pair.mean)
    optimizer.setup(model)

    with pytest.raises(OSError, match="no batch"):
        optimizer.update(fail)
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        optimizer.update(fail)


def test_ranks_have_one_threshold(naive):
    model = two_layers()
    optimizer = SGD().setup(model)
    optimizer.add_hook(MultiNodeGradientClipping(1 + naive.rank, naive))
    with pytest.raises(RankMismatchError, match="threshold"):
        optimizer.update(model, *batch(0, 0))


@pytest.mark.parametrize("add_hooks", [clip, scale])
@pytest.mark.parametrize("is_multi_node", [False, True])
def test_a_hook_waits_for_parameters_that_get_values(naive, add_hooks, is_multi_node):
    """The first update makes no step; a part that has Chainer's optimizer raises there."""
    part = naive.rank % 2
    same_part = naive.split(part, naive.rank)
    model = L.Linear([None, 2][part], 2)
    optimizer = SGD()
    if is_multi_node or not part:
        optimizer = create_multi_node_optimizer(optimizer, same_part)
    optimizer.setup(model)
    add_hooks(optimizer, naive)

    def loss():
        return F.sum(model(np.ones((1, 2), "f4")))

    expected = nullcontext()
    if part and not is_multi_node:
        expected = pytest.raises(
            RankMismatchError, match="use create_multi_node_optimizer"
        )
    with expected:
        optimizer.update(loss)
    for _ in range(2):
        optimizer.update(loss)
    assert naive.allgather_obj(optimizer.t) == [2] * naive.size

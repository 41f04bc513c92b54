"""Steps in blocks: the same bits as Chainer's own, and only where blocks are right."""

from __future__ import annotations

import chainer
import numpy as np
import pytest

from chainermn_train import create_multi_node_optimizer
from chainermn_train.optimizers import block_updates

pytestmark = [pytest.mark.world, pytest.mark.sizes(2)]

SHAPE = (25, 10)
BLOCK_SIZE = 100
optimizers = chainer.optimizers

OPTIMIZERS = {
    "AdaGrad": optimizers.AdaGrad,
    "Adam": optimizers.Adam,
    "Adam with decoupled decay": lambda: optimizers.AdamW(weight_decay_rate=0.01),
    "AMSGrad": optimizers.AMSGrad,
    "AdaBound": optimizers.AdaBound,
    "AMSBound": optimizers.AMSBound,
    "MomentumSGD": optimizers.MomentumSGD,
    "NesterovAG": optimizers.NesterovAG,
    "RMSprop": optimizers.RMSprop,
}


class Model(chainer.Link):
    """One parameter, whose gradient is the input."""

    def __init__(self, dtype: str):
        super().__init__()
        values = np.random.RandomState(0).randn(*SHAPE)
        with self.init_scope():
            self.w = chainer.Parameter(values.astype(dtype))

    def forward(self, x):
        return chainer.functions.sum(self.w * x)


@pytest.fixture
def sizes(monkeypatch):
    """The sizes of the arrays that Chainer's rules have updated since blocks are small."""
    found: set[int] = set()

    def spy_on(kind):
        own = kind.update_core_cpu

        def update(rule, param):
            found.add(param.size)
            own(rule, param)

        monkeypatch.setattr(kind, "update_core_cpu", update)

    monkeypatch.setattr(block_updates, "BLOCK_SIZE", BLOCK_SIZE)
    for kind in block_updates.RULES:
        spy_on(kind)
    return found


def inputs(step: int, dtype: str) -> np.ndarray:
    return np.random.RandomState(step).randn(*SHAPE).astype(dtype)


def train(optimizer, model, dtype: str, steps: int) -> list[np.ndarray]:
    """Return the parameter and its rule's state after so many steps."""
    for step in range(steps):
        optimizer.update(model, inputs(step, dtype))
    rule = model.w.update_rule
    return [model.w.array, *rule.state.values()]


def bits(arrays: list[np.ndarray]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize("dtype", ["f", "d", "e"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_in_blocks_have_the_bits_of_chainers_own(naive, sizes, make, dtype):
    def prepared(optimizer, model):
        if dtype == "e":
            optimizer.use_fp32_update()
        optimizer.setup(model)
        optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(1e-3))
        return optimizer

    model = Model(dtype)
    expected = bits(train(prepared(make(), model), model, dtype, 60))
    assert sizes == {250}
    sizes.clear()
    model = Model(dtype)
    multi_node = create_multi_node_optimizer(make(), naive)
    assert bits(train(prepared(multi_node, model), model, dtype, 60)) == expected
    assert sizes == {100, 50}


def change_a_hyperparameter(model):
    model.w.update_rule.hyperparam.lr = np.full(SHAPE, 0.01, "f")


def change_the_order(model):
    model.w.array = np.asfortranarray(model.w.array)


def replace_the_method(model):
    rule = model.w.update_rule
    rule.update_core_cpu = type(rule).update_core_cpu.__get__(rule)


def share_the_rule(model):
    with model.init_scope():
        model.v = chainer.Parameter(np.ones(SHAPE, "f"))
    model.v.update_rule = model.w.update_rule


@pytest.mark.parametrize(
    ("change", "blocks"),
    [
        (change_a_hyperparameter, set()),
        (change_the_order, set()),
        (replace_the_method, set()),
        (share_the_rule, {100, 50}),
    ],
)
def test_other_rules_and_arrays_step_as_ever(naive, sizes, change, blocks):
    def trained(optimizer):
        model = Model("f")
        optimizer.setup(model)
        change(model)
        return bits(train(optimizer, model, "f", 3))

    actual = optimizers.MomentumSGD(0.01)
    assert trained(create_multi_node_optimizer(actual, naive)) == trained(
        optimizers.MomentumSGD(0.01)
    )
    assert sizes == {250} | blocks


def test_a_rule_keeps_no_method_of_ours(naive, sizes):
    model = Model("f")
    optimizer = create_multi_node_optimizer(optimizers.Adam(), naive).setup(model)

    def fail(rule, param):
        raise OSError("planted")

    train(optimizer, model, "f", 2)
    model.w.update_rule.add_hook(fail, "fail")
    with pytest.raises(OSError, match="planted"):
        train(optimizer, model, "f", 1)
    assert "update_core_cpu" not in vars(model.w.update_rule)

"""`create_mnbn_model`: what is converted, and what stays."""

from __future__ import annotations

import functools

import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import Chain, ChainList, Parameter, Sequential, using_config
from chainer.link_hooks import TimerHook
from chainer.optimizers import Adam
from numpy.testing import assert_array_equal

from chainermn_modelparallel import MultiNodeBatchNormalization, create_mnbn_model

pytestmark = pytest.mark.world


class Block(Chain):
    """A chain with a parameter, a persistent value and a setting of its own."""

    def __init__(self, size=4):
        super().__init__()
        self.add_persistent("counter", np.array(7))
        self.slope = 0.5
        with self.init_scope():
            self.scale = Parameter(np.array(2.0, "f"))
            self.linear = L.Linear(None, size)
            self.bn = L.BatchNormalization(size, decay=0.7, eps=1e-3)

    def forward(self, x):
        y = F.leaky_relu(self.bn(self.linear(x)), self.slope)
        return y * F.broadcast_to(self.scale, y.shape)


class Blocks(ChainList):
    def forward(self, x):
        for link in self:
            x = link(x)
        return x


class NamedSequential(Sequential):
    """A subclass, which Chainer's own `copy` would turn into a plain one."""


def model():
    dropout = functools.partial(F.dropout, ratio=0.0)
    inner = Sequential(
        L.BatchNormalization(axis=0), lambda x: F.relu(x), dropout, Block()
    )
    blocks = Blocks(Block(), L.BatchNormalization(4), inner)
    return NamedSequential(Block(), F.tanh, blocks, L.Linear(4, 2))


def kinds(link):
    return {path: type(part).__name__ for path, part in link.namedlinks()}


def test_every_batch_normalization_is_converted_and_nothing_else(comm):
    original = model()
    before = kinds(original)
    converted = create_mnbn_model(original, comm)
    assert kinds(original) == before
    expected = {
        path: kind.replace("BatchNorm", "MultiNodeBatchNorm")
        for path, kind in before.items()
    }
    assert kinds(converted) == expected
    bn = converted[0].bn
    assert bn.comm == comm
    assert bn.communication_backend == "auto"
    assert bn.decay == 0.7
    assert bn.eps == 1e-3
    assert converted[0].slope == 0.5
    assert converted[1] is F.tanh


def test_values_are_kept_and_not_shared(comm, random):
    original = model()
    x = random.standard_normal((3, 5)).astype("f")
    original(x)  # initialises, and moves running statistics
    original[0].counter += 1
    converted = create_mnbn_model(original, comm)
    theirs = dict(original.namedparams())
    ours = dict(converted.namedparams())
    assert ours.keys() == theirs.keys()
    for path, param in ours.items():
        assert not np.shares_memory(param.array, theirs[path].array)
    assert converted[0].counter == 8
    with using_config("train", False):
        assert_array_equal(converted(x).array, original(x).array)


def test_a_link_used_twice_is_converted_once(comm):
    shared = L.BatchNormalization(4)
    converted = create_mnbn_model(Sequential(shared, Block(), shared), comm)
    assert converted[0] is converted[2]
    assert type(converted[0]) is MultiNodeBatchNormalization
    chain = Chain(a=Block(), b=L.BatchNormalization(4))
    chain.again = chain.a.bn  # an attribute that is not registered
    with chain.a.bn.init_scope():
        chain.a.bn.gamma = chain.b.gamma
    converted = create_mnbn_model(chain, comm)
    assert converted.again is converted.a.bn
    assert converted.a.bn.gamma is converted.b.gamma


def test_hooks_and_update_rules_are_kept(comm):
    timer = TimerHook()
    original = Block()
    original.bn.add_hook(timer)
    Adam().setup(original)
    original.scale.update_rule.enabled = False
    converted = create_mnbn_model(original, comm)
    assert converted.bn.local_link_hooks == {"TimerHook": timer}
    converted(np.ones((2, 3), "f"))
    assert len(timer.call_history) == 1
    assert not converted.scale.update_rule.enabled


def test_a_batch_normalization_itself_and_one_already_converted(comm):
    converted = create_mnbn_model(
        L.BatchNormalization(3), comm, communication_backend="mpi"
    )
    again = create_mnbn_model(Sequential(converted, L.BatchNormalization(3)), comm)
    assert [link.communication_backend for link in again] == ["mpi", "auto"]
    for link in again.copy("copy"):
        assert link.comm is comm


class BatchNormalization(L.BatchNormalization):
    """One with settings of its own, as models have."""

    def __init__(self, size):
        super().__init__(size, decay=0.7, eps=1e-3)
        self.remark = "mine"


class Doubled(BatchNormalization):
    def __call__(self, x, **kwargs):
        return super().__call__(x, **kwargs) * 2


def test_subclasses_that_only_construct_are_converted(comm):
    model = Chain(a=BatchNormalization(3), b=Doubled(3), c=L.BatchRenormalization(3))
    with pytest.warns(UserWarning, match="leaves /[bc] as it is: .*") as warned:
        converted = create_mnbn_model(model, comm)
    assert len(warned) == 2
    kinds = [MultiNodeBatchNormalization, Doubled, L.BatchRenormalization]
    assert [type(each) for each in converted.children()] == kinds
    assert converted.a.eps == 1e-3
    assert converted.a.remark == "mine"
    create_mnbn_model(Chain(a=converted.a), comm)  # warns of nothing


def test_wrong_arguments_raise(comm):
    with pytest.raises(TypeError, match=r"link must be a chainer\.Link, got function"):
        create_mnbn_model(F.relu, comm)
    with pytest.raises(TypeError, match="comm must be a communicator"):
        create_mnbn_model(Block(), None)
    with pytest.raises(ValueError, match="must be one of auto, mpi, nccl, got 'tcp'"):
        create_mnbn_model(Block(), comm, communication_backend="tcp")

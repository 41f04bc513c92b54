# ruff: noqa: F401
import chainer
import chainer.links as L
import numpy as np
from chainer.training.extensions import Evaluator

import chainermn_comm
import chainermn_train

model = L.Classifier(L.Linear(4, 3))
train = [(np.ones(4, np.float32), np.int32(i % 3)) for i in range(10)]
test_iter = chainer.iterators.SerialIterator(train, 5, repeat=False)
optimizer = chainer.optimizers.SGD().setup(model)
updater = chainer.training.StandardUpdater(
    chainer.iterators.SerialIterator(train, 5), optimizer
)
trainer = chainer.training.Trainer(updater)

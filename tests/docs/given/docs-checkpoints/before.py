import chainer
import chainer.links as L
import chainermn
import numpy as np
from chainer import training

comm = chainermn.create_communicator()
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
optimizer.setup(L.Classifier(L.Linear(100, 10)))
examples = [(np.ones(100, np.float32), np.int32(i % 10)) for i in range(100)]
iterator = chainer.iterators.SerialIterator(examples, 10)
updater = training.StandardUpdater(iterator, optimizer)
trainer = training.Trainer(updater, (3, "epoch"))

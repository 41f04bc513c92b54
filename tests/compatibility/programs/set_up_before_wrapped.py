"""An optimizer that has its model, its hooks and a step behind it when it is wrapped."""

import json

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np


def make_model(seed):
    np.random.seed(seed)
    return chainer.Sequential(L.Linear(2, 4), F.sigmoid, L.Linear(4, 1))


def make_optimizer(model):
    optimizer = chainer.optimizers.MomentumSGD(lr=0.25)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(0.5))
    optimizer.update(loss_of, model, np.ones((1, 2), np.float32))
    return optimizer


def make_examples():
    return np.random.RandomState(1).uniform(-1, 1, (12, 2)).astype(np.float32)


def loss_of(model, batch):
    return F.mean_squared_error(model(batch), batch[:, :1] * batch[:, 1:])


def main():
    comm = chainermn.create_communicator("two_dimensional")
    model = make_model(seed=comm.rank)
    optimizer = make_optimizer(model)
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    examples = chainermn.scatter_dataset(
        make_examples() if comm.rank == 0 else None, comm
    )
    iterator = chainer.iterators.SerialIterator(examples, 2, shuffle=False)
    for _ in range(5):
        batch = chainer.dataset.concat_examples(iterator.next())
        optimizer.update(loss_of, model, batch)
    weights = [param.array.tolist() for param in model.params()]
    everyone = comm.gather_obj({"t": optimizer.t, "weights": weights})
    if comm.rank == 0:
        print(json.dumps(everyone))


if __name__ == "__main__":
    main()

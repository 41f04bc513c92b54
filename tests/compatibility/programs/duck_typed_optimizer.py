"""A class of one's own around the optimizer: each second step is taken half way back."""

import json

import chainer
import chainer.links as L
import chainermn
import numpy as np


class HalfWay:
    """Lets the optimizer make two steps, then puts the weights half way back."""

    def __init__(self, optimizer):
        super().__setattr__("optimizer", optimizer)
        super().__setattr__("starts", None)

    def __getattr__(self, name):
        return getattr(self.optimizer, name)

    def __setattr__(self, name, value):
        if name == "starts":
            super().__setattr__(name, value)
        else:
            setattr(self.optimizer, name, value)

    def update(self, lossfun=None, *args, **kwds):
        self.optimizer.update(lossfun, *args, **kwds)
        weights = {name: param.array for name, param in self.target.namedparams()}
        if self.starts is None:
            self.starts = {name: weight.copy() for name, weight in weights.items()}
            return
        for name, weight in weights.items():
            weight[...] = (weight + self.starts[name]) / 2
        self.starts = None


def make_model():
    np.random.seed(0)
    return L.Classifier(L.Linear(3, 2))


def make_optimizer():
    return chainer.optimizers.MomentumSGD(lr=0.1)


def make_examples():
    random = np.random.RandomState(1)
    inputs = random.uniform(-1, 1, (24, 3)).astype(np.float32)
    labels = (inputs.sum(axis=1) > 0).astype(np.int32)
    return chainer.datasets.TupleDataset(inputs, labels)


def main():
    comm = chainermn.create_communicator("flat")
    model = make_model()
    optimizer = chainermn.create_multi_node_optimizer(make_optimizer(), comm)
    optimizer = HalfWay(optimizer)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(0.01))
    examples = None
    if comm.rank == 0:
        examples = make_examples()
    examples = chainermn.scatter_dataset(examples, comm)
    iterator = chainer.iterators.SerialIterator(examples, 4, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    trainer = chainer.training.Trainer(updater, (8, "iteration"))
    trainer.extend(chainer.training.extensions.ExponentialShift("lr", 0.5))
    trainer.run()
    result = {"lr": optimizer.lr, "weights": [p.array.tolist() for p in model.params()]}
    everyone = comm.gather_obj(result)
    if comm.rank == 0:
        print(json.dumps(everyone))


if __name__ == "__main__":
    main()

"""A multi-node optimizer of one's own: ranks step alone, and average their weights now and then."""

import json

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainermn.optimizers import _MultiNodeOptimizer

EVERY = 3


class SeldomAveraged(_MultiNodeOptimizer):
    def __init__(self, actual_optimizer, communicator, zero_fill=True):
        super().__init__(actual_optimizer, communicator, zero_fill)
        super().__setattr__("target_params", [])
        super().__setattr__("count", 0)

    def update(self, lossfun=None, *args, **kwds):
        target = self.target
        loss = lossfun(*args, **kwds)
        target.cleargrads()
        loss.backward()
        if self.is_changed(target):
            self.communicator.bcast_data(target)
            return
        self.actual_optimizer.update(None, *args, **kwds)
        super().__setattr__("count", self.count + 1)
        if self.count % EVERY == 0:
            for _, param in sorted(target.namedparams()):
                total = self.communicator.allreduce(param.array)
                param.array[...] = total / self.communicator.size


def make_model(seed):
    np.random.seed(seed)
    return L.Linear(2, 2)


def make_optimizer():
    return chainer.optimizers.NesterovAG(lr=0.1)


def make_examples():
    return np.random.RandomState(1).uniform(-1, 1, (24, 2)).astype(np.float32)


def main():
    comm = chainermn.create_communicator("naive")
    model = make_model(seed=comm.rank)
    optimizer = SeldomAveraged(make_optimizer(), comm)
    optimizer.setup(model)
    optimizer.lr *= 2
    examples = chainermn.scatter_dataset(
        make_examples() if comm.rank == 0 else None, comm
    )
    iterator = chainer.iterators.SerialIterator(examples, 4, shuffle=False)
    weights = []
    for _ in range(1 + EVERY):
        batch = chainer.dataset.concat_examples(iterator.next())
        optimizer.update(lambda batch: F.mean(model(batch) ** 2), batch)
        weights.append([param.array.tolist() for param in model.params()])
    result = {"t": optimizer.t, "count": optimizer.count, "weights": weights}
    everyone = comm.gather_obj(result)
    if comm.rank == 0:
        print(json.dumps(everyone))


if __name__ == "__main__":
    main()

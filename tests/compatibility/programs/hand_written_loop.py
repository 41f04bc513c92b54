"""A loop of one's own: gradients by `backward`, then `update()` without a loss function."""

import json

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np

STEPS = 5


def make_model(seed):
    np.random.seed(seed)
    return chainer.Sequential(L.Linear(3, 6), F.relu, L.Linear(6, 1))


def make_optimizer():
    return chainer.optimizers.Adam()


def make_examples():
    random = np.random.RandomState(1)
    return random.uniform(-1, 1, (24, 4)).astype(np.float32)


def loss_of(model, batch):
    return F.mean_squared_error(model(batch[:, :3]), batch[:, 3:])


def main():
    comm = chainermn.create_communicator("naive")
    model = make_model(seed=comm.rank)
    optimizer = chainermn.create_multi_node_optimizer(make_optimizer(), comm)
    optimizer.setup(model)
    examples = chainermn.scatter_dataset(
        make_examples() if comm.rank == 0 else None, comm
    )
    iterator = chainer.iterators.SerialIterator(examples, 4, shuffle=False)
    times = []
    for _ in range(STEPS):
        batch = chainer.dataset.concat_examples(iterator.next())
        model.cleargrads()
        loss_of(model, batch).backward()
        optimizer.update()
        times.append(optimizer.t)
    weights = [param.array.tolist() for param in model.params()]
    everyone = comm.gather_obj({"t": times, "weights": weights})
    if comm.rank == 0:
        print(json.dumps(everyone))


if __name__ == "__main__":
    main()

"""Two networks that play against each other; workers of a fork server make the batches."""

import json
import multiprocessing

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np


class GanUpdater(chainer.training.StandardUpdater):
    def __init__(self, *args, **kwargs):
        self.maker, self.judge = kwargs.pop("models")
        super().__init__(*args, **kwargs)

    def loss_of_judge(self, on_real, on_fake):
        return F.mean(F.softplus(-on_real)) + F.mean(F.softplus(on_fake))

    def loss_of_maker(self, on_fake):
        return F.mean(F.softplus(-on_fake))

    def update_core(self):
        batch = self.get_iterator("main").next()
        real, noise = self.converter(batch, self.device)
        fake = self.maker(noise)
        on_real = self.judge(real)
        on_fake = self.judge(fake)
        self.get_optimizer("judge").update(self.loss_of_judge, on_real, on_fake)
        self.get_optimizer("maker").update(self.loss_of_maker, on_fake)


def make_models():
    np.random.seed(0)
    maker = chainer.Sequential(L.Linear(2, 8), F.tanh, L.Linear(8, 3))
    judge = chainer.Sequential(L.Linear(3, 8), F.tanh, L.Linear(8, 1))
    return maker, judge


def make_examples():
    random = np.random.RandomState(1)
    reals = random.uniform(1, 2, (48, 3)).astype(np.float32)
    noises = random.uniform(-1, 1, (48, 2)).astype(np.float32)
    return chainer.datasets.TupleDataset(reals, noises)


def make_optimizer():
    return chainer.optimizers.Adam(alpha=0.01, beta1=0.5)


def main():
    multiprocessing.set_start_method("forkserver")
    comm = chainermn.create_communicator()
    maker, judge = make_models()
    of_maker = chainermn.create_multi_node_optimizer(make_optimizer(), comm)
    of_maker.setup(maker)
    of_judge = chainermn.create_multi_node_optimizer(make_optimizer(), comm)
    of_judge.setup(judge)
    examples = chainermn.scatter_dataset(
        make_examples() if comm.rank == 0 else None, comm
    )
    iterator = chainer.iterators.MultiprocessIterator(
        examples, 4, n_processes=2, shuffle=False
    )
    updater = GanUpdater(
        iterator, {"maker": of_maker, "judge": of_judge}, models=(maker, judge)
    )
    chainer.training.Trainer(updater, (6, "iteration")).run()
    iterator.finalize()
    params = [*maker.params(), *judge.params()]
    everyone = comm.gather_obj([param.array.tolist() for param in params])
    if comm.rank == 0:
        print(json.dumps(everyone))


if __name__ == "__main__":
    main()

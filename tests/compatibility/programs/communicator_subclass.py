"""A communicator with its own mean of gradients: each rank has a vote on the direction."""

import json

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainermn.communicators import mpi_communicator_base
from mpi4py import MPI


class VotingCommunicator(mpi_communicator_base.MpiCommunicatorBase):
    def __init__(self, mpi_comm):
        super().__init__(mpi_comm)

    def allreduce_grad(self, model):
        for _, param in sorted(model.namedparams()):
            votes = np.sign(param.grad)
            self.mpi_comm.Allreduce(MPI.IN_PLACE, votes)
            param.grad = np.sign(votes)


def make_model(seed):
    np.random.seed(seed)
    return L.Classifier(L.Linear(3, 1), lossfun=F.mean_squared_error)


def make_optimizer():
    return chainer.optimizers.SGD(lr=0.125)


def make_examples():
    random = np.random.RandomState(1)
    inputs = random.uniform(-1, 1, (24, 3)).astype(np.float32)
    return chainer.datasets.TupleDataset(inputs, inputs[:, :1] - 1)


def main():
    comm = VotingCommunicator(MPI.COMM_WORLD)
    model = make_model(seed=comm.rank)
    model.compute_accuracy = False
    optimizer = chainermn.create_multi_node_optimizer(make_optimizer(), comm)
    optimizer.setup(model)
    examples = None
    if comm.rank == 0:
        examples = make_examples()
    examples = chainermn.scatter_dataset(examples, comm)
    iterator = chainer.iterators.SerialIterator(examples, 4, shuffle=False)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    chainer.training.Trainer(updater, (6, "iteration")).run()
    everyone = comm.gather_obj([param.array.tolist() for param in model.params()])
    if comm.rank == 0:
        print(json.dumps(everyone))


if __name__ == "__main__":
    main()

"""Trains copies of a perceptron on handwritten digits, each with its layers on two ranks.

    mpiexec -n 4 python train_mnist_dual_parallel.py

Data parallel and model parallel at once. Ranks 0 and 1 hold one copy of the model (that of
train_mnist_model_parallel.py), ranks 2 and 3 another, and so on. Each copy learns from its own
share of the examples; ranks that hold the same layers (0, 2, ... and 1, 3, ...) apply the mean of
their gradients. Rank 0 leaves `log` in the folder `--out`, and ranks 0 and 1 their layers in
`model_rank0.npz` and `model_rank1.npz`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import chainer
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions
from mistakes import create_communicator, stop_if, too_large
from mpi4py import MPI
from options import BATCHSIZE, options, parse
from train_mnist import SEED, load, print_results
from train_mnist_model_parallel import PIXELS, RANKS, create_model, refuse_ranks, report


def main(argv: Sequence[str] | None = None) -> None:
    description = "ChainerMN example: copies of a model whose layers lie on two ranks"
    args = parse(options(description), argv)
    if MPI.COMM_WORLD.size % RANKS:
        refuse_ranks(f"each copy of the model lies on {RANKS} ranks: a multiple is needed")
    comm = create_communicator(args)

    # The ranks of this copy of the model, and those that hold the same layers of other copies.
    model_comm = comm.split(comm.rank // RANKS, comm.rank)
    data_comm = comm.split(comm.rank % RANKS, comm.rank)

    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    # Rank 0 reads the data, and the first rank of each copy gets its share.
    train, test = load(args.dataset, comm)
    n_train = comm.bcast_obj(len(train) if comm.rank == 0 else None)
    share = -(-n_train // data_comm.size)
    args.batchsize = args.batchsize or min(BATCHSIZE, share)
    stop_if(comm, too_large(args.batchsize, share))
    if comm.rank == 0:
        print(
            f"communicator {args.communicator}, {data_comm.size} copies of the model on "
            f"{model_comm.size} ranks each; {args.dataset}: {n_train} training and {len(test)} "
            f"test examples; batch {args.batchsize} a copy",
            flush=True,
        )
    if model_comm.rank == 0:
        train = chainermn.scatter_dataset(train, data_comm, shuffle=True, seed=SEED)
        test = chainermn.scatter_dataset(test, data_comm, force_equal_length=False)
    # The other ranks of the copy are in step with it, but have no use for the examples.
    lengths = model_comm.bcast_obj((len(train), len(test)) if model_comm.rank == 0 else None)
    if model_comm.rank > 0:
        train, test = (chainermn.create_empty_dataset(range(length)) for length in lengths)
    np.random.seed(SEED + comm.rank)  # layers start differently; copies get rank 0's and 1's
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(test, args.batchsize, repeat=False, shuffle=False)

    model = create_model(model_comm, PIXELS[args.dataset], args.unit, 10)
    if args.gpu:
        model.to_gpu()
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), data_comm)
    optimizer.setup(model)

    updater = training.StandardUpdater(train_iter, optimizer, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    evaluator = extensions.Evaluator(test_iter, model, device=device)
    trainer.extend(chainermn.create_multi_node_evaluator(evaluator, data_comm))
    if comm.rank == 0:
        report(trainer)
    trainer.run()

    if data_comm.rank == 0:
        chainer.serializers.save_npz(os.path.join(args.out, f"model_rank{comm.rank}.npz"), model)
    if comm.rank == 0:
        print_results(trainer, "model_rank0.npz and model_rank1.npz")


if __name__ == "__main__":
    main()

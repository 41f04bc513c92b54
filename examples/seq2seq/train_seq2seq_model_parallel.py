"""Learns to translate dates from words to digits, with encoder and decoder on different ranks.

    mpiexec -n 2 python train_seq2seq_model_parallel.py

Rank 0 makes the corpus and has the encoder, rank 1 has the decoder, and so the loss.
Both get rank 0's batches: one uses the words, the other the digits. Rank 1 leaves `log`
in the folder `--out`, and each rank its model there.
"""

import argparse
import os

import chainer
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions
from dates import characters_of, make_corpus, words_of
from models import Decoder, Encoder
from sequences import convert

ENCODER, DECODER = 0, 1
LONGEST = 16  # characters of a translation; a date has 10
SHOWN = 5  # translations to look at


def translate(model, iterator, device):
    """Source, target and translation of each example, at the decoder; empty at the encoder."""
    triples = []
    iterator.reset()
    with chainer.using_config("train", False), chainer.no_backprop_mode():
        for batch in iterator:
            sources, targets = zip(*batch, strict=True)
            if isinstance(model, Encoder):
                model.encode(convert(batch, device)["xs"])
            else:
                found = model.decode(len(batch), LONGEST)
                triples += list(zip(sources, targets, found, strict=True))
    return triples


def exact(triples):
    """The part of the translations that are right to the last character."""
    return sum(np.array_equal(found, target) for _, target, found in triples) / len(
        triples
    )


def main():
    parser = argparse.ArgumentParser(
        description="ChainerMN example: encoder and decoder apart"
    )
    parser.add_argument("--communicator", default="hierarchical")
    parser.add_argument(
        "--gpu", action="store_true", help="a GPU for each rank of a node"
    )
    parser.add_argument("--batchsize", "-b", type=int, default=100)
    parser.add_argument("--epoch", "-e", type=int, default=10)
    parser.add_argument("--unit", "-u", type=int, default=128, help="of each layer")
    parser.add_argument(
        "--examples", type=int, default=4000, help="dates to learn from"
    )
    parser.add_argument(
        "--tests", type=int, default=500, help="other dates, to translate"
    )
    parser.add_argument(
        "--out", "-o", default="result", help="folder for what is written"
    )
    args = parser.parse_args()

    comm = chainermn.create_communicator(args.communicator)
    if comm.size != 2:
        raise ValueError(
            f"encoder and decoder lie on 2 ranks, not {comm.size}: use mpiexec -n 2"
        )
    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    np.random.seed(comm.rank)  # a run can be repeated
    # Only rank 0 has the corpus; the iterators give its batches on both ranks.
    train_iter, test_iter = None, None
    if comm.rank == 0:
        train, test = make_corpus(args.examples, args.tests, seed=0)
        train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
        test_iter = chainer.iterators.SerialIterator(
            test, args.batchsize, repeat=False, shuffle=False
        )
    train_iter = chainermn.iterators.create_multi_node_iterator(train_iter, comm)
    test_iter = chainermn.iterators.create_multi_node_iterator(test_iter, comm)

    if comm.rank == ENCODER:
        model = Encoder(comm, args.unit, decoder=DECODER)
    else:
        model = Decoder(comm, args.unit, encoder=ENCODER)
    if args.gpu:
        model.to_gpu()
    optimizer = chainer.optimizers.Adam(0.005)  # of this rank's model alone
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5))

    updater = training.StandardUpdater(
        train_iter, optimizer, converter=convert, device=device
    )
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)

    @training.make_extension(trigger=(1, "epoch"), priority=training.PRIORITY_WRITER)
    def validate(trainer):
        triples = translate(model, test_iter, device)
        if comm.rank == DECODER:
            chainer.report({"validation/exact": exact(triples)})

    trainer.extend(validate)
    if comm.rank == DECODER:
        trainer.extend(extensions.LogReport())
        columns = [
            "epoch",
            "main/loss",
            "main/accuracy",
            "validation/exact",
            "elapsed_time",
        ]
        trainer.extend(extensions.PrintReport(columns))
    trainer.run()

    name = "encoder.npz" if comm.rank == ENCODER else "decoder.npz"
    chainer.serializers.save_npz(os.path.join(args.out, name), model)
    triples = translate(model, test_iter, device)
    for source, target, found in triples[:SHOWN]:
        print(
            f"{words_of(source)}\n    {characters_of(found)} ({characters_of(target)})"
        )


if __name__ == "__main__":
    main()

"""Learns to translate dates from words to digits, with encoder and decoder on different ranks.

    mpiexec -n 2 python train_seq2seq.py

Rank 0 makes the corpus and has the encoder, rank 1 has the decoder, and so the loss. Both get
rank 0's batches: one uses the words, the other the digits. Rank 1 leaves `log` in the folder
`--out`, and each rank its model there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chainer
import numpy as np
from chainer import training
from chainer.training import extensions
from chainermn.iterators import create_multi_node_iterator
from dates import DAYS, characters_of, make_corpus, words_of
from models import Decoder, Encoder
from mpi4py import MPI

# What the examples have in common: how the command line is read, and mistakes are told.
sys.path.append(str(Path(__file__).resolve().parents[1] / "mnist"))
from mistakes import create_communicator, program, stop_all, too_large
from options import BATCHSIZE, common_options, parse, positive

SEED = 0  # of the corpus and the first weights: a run can be repeated
ENCODER, DECODER = 0, 1
LONGEST = 16  # characters of a translation; a date has 10
SHOWN = 5  # translations to look at


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    if MPI.COMM_WORLD.size != 2:
        stop_all(f"encoder and decoder need a rank each: mpiexec -n 2 python {program()}")
    comm = create_communicator(args)

    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    np.random.seed(SEED + comm.rank)
    # Only rank 0 has the corpus; the iterators give its batches on both ranks.
    train_iter, test_iter = None, None
    if comm.rank == 0:
        train, test = make_corpus(args.examples, args.tests, SEED)
        train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
        test_iter = chainer.iterators.SerialIterator(
            test, args.batchsize, repeat=False, shuffle=False
        )
    train_iter = create_multi_node_iterator(train_iter, comm)
    test_iter = create_multi_node_iterator(test_iter, comm)

    model: Any
    if comm.rank == ENCODER:
        model = Encoder(comm, args.unit, decoder=DECODER)
    else:
        model = Decoder(comm, args.unit, encoder=ENCODER)
    if args.gpu:
        model.to_gpu()
    optimizer = chainer.optimizers.Adam(0.005)  # of this rank's model alone
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer.GradientClipping(5))

    updater = training.StandardUpdater(train_iter, optimizer, converter=convert, device=device)
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)

    @training.make_extension(trigger=(1, "epoch"), priority=training.PRIORITY_WRITER)
    def validate(trainer: Any) -> None:
        pairs = translate(model, test_iter, device)
        if comm.rank == DECODER:
            chainer.report({"validation/exact": exact(pairs)})

    trainer.extend(validate)
    if comm.rank == DECODER:
        trainer.extend(extensions.LogReport())
        columns = ["epoch", "main/loss", "main/accuracy", "validation/exact", "elapsed_time"]
        trainer.extend(extensions.PrintReport(columns))
    trainer.run()

    name = "encoder.npz" if comm.rank == ENCODER else "decoder.npz"
    chainer.serializers.save_npz(os.path.join(args.out, name), model)
    pairs = translate(model, test_iter, device)
    if comm.rank == DECODER:
        for source, target, found in pairs[:SHOWN]:
            print(f"{words_of(source)}\n    {characters_of(found)} ({characters_of(target)})")
        print(f"{exact(pairs):.1%} of {len(pairs)} dates that it never saw are translated exactly")


def translate(model: Any, iterator: Any, device: int) -> list[tuple[Any, Any, Any]]:
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


def exact(triples: list[tuple[Any, Any, Any]]) -> float:
    """The part of the translations that are right to the last character."""
    return sum(np.array_equal(found, target) for _, target, found in triples) / len(triples)


def convert(batch: list[Any], device: int) -> dict[str, list[Any]]:
    """The arguments of the models: sequences differ in length, so they stay separate."""
    to_device = chainer.dataset.to_device
    return {
        "xs": [to_device(device, source) for source, _ in batch],
        "ys": [to_device(device, target) for _, target in batch],
    }


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = common_options("ChainerMN example: dates from words to digits", epochs=10)
    add = parser.add_argument
    add("--batchsize", "-b", type=positive, help=f"default: {BATCHSIZE}")
    add("--unit", "-u", type=positive, default=128, help="per layer (default: %(default)s)")
    add(
        "--examples", type=positive, default=4000, help="dates to learn from (default: %(default)s)"
    )
    add(
        "--tests",
        type=positive,
        default=500,
        help="other dates to translate (default: %(default)s)",
    )
    args = parse(parser, argv)
    if args.examples + args.tests > DAYS:
        stop_all(f"--examples and --tests: there are {DAYS} dates in all")
    args.batchsize = args.batchsize or min(BATCHSIZE, args.examples)
    if problem := too_large(args.batchsize, args.examples):
        stop_all(problem)
    return args


if __name__ == "__main__":
    main()

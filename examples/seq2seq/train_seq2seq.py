"""Learns to translate dates from words to digits, on any number of ranks.

    mpiexec -n 2 python train_seq2seq.py

Each rank has its share of the dates, and the whole model, an encoder and a decoder.
Dates are sequences of different lengths, for which the script has a converter of its
own. Rank 0 leaves `log` and `model.npz` in the folder `--out`, and prints some
translations.
"""

import argparse
import os

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy as np
from chainer import training
from chainer.training import extensions
from dates import BEGIN, CHARACTERS, END, WORDS, characters_of, make_corpus, words_of
from sequences import convert, embedded, up_to_end

LONGEST = 16  # characters of a translation; a date has 10
SHOWN = 5  # translations to look at


class Translator(chainer.Chain):
    def __init__(self, n_units):
        super().__init__()
        n_characters = len(CHARACTERS) + 2  # BEGIN and END
        with self.init_scope():
            self.embed_words = L.EmbedID(len(WORDS), n_units)
            self.embed_characters = L.EmbedID(n_characters, n_units)
            self.encoder = L.NStepLSTM(1, n_units, n_units, 0.0)
            self.decoder = L.NStepLSTM(1, n_units, n_units, 0.0)
            self.score = L.Linear(n_units, n_characters)

    def encode(self, xs):
        hy, cy, _ = self.encoder(None, None, embedded(self.embed_words, xs))
        return hy, cy

    def forward(self, xs, ys):
        """The mean cross entropy of the characters, each told from those before it."""
        before = [self.xp.append(BEGIN, y).astype(y.dtype) for y in ys]
        after = [self.xp.append(y, END).astype(y.dtype) for y in ys]
        _, _, hs = self.decoder(
            *self.encode(xs), embedded(self.embed_characters, before)
        )
        scores, truth = self.score(F.concat(hs, axis=0)), self.xp.concatenate(after)
        loss = F.softmax_cross_entropy(scores, truth)
        chainer.report({"loss": loss, "accuracy": F.accuracy(scores, truth)}, self)
        return loss

    def translate(self, xs):
        """Write for each date the likeliest character after those that were chosen before it."""
        hy, cy = self.encode(xs)
        columns = [self.xp.full(len(xs), BEGIN, "i")]
        for _ in range(LONGEST):
            hs = embedded(self.embed_characters, list(columns[-1][:, None]))
            hy, cy, hs = self.decoder(hy, cy, hs)
            columns.append(
                self.score(F.concat(hs, axis=0)).array.argmax(axis=1).astype("i")
            )
        return up_to_end(columns[1:])


class ExactTranslations(chainermn.extensions.GenericMultiNodeEvaluator):
    """Reports `validation/exact`, the part of all ranks' dates that are right in each character."""

    def calc_local(self, xs, ys):
        found, ys = self.target(xs), [chainer.backends.cuda.to_cpu(y) for y in ys]
        return sum(map(np.array_equal, found, ys)), len(ys)

    def aggregate(self, results):
        exact, count = np.sum(list(results), axis=0)
        return {"exact": exact / count}


def main():
    parser = argparse.ArgumentParser(
        description="ChainerMN example: dates from words to digits"
    )
    parser.add_argument("--communicator", default="hierarchical")
    parser.add_argument(
        "--gpu", action="store_true", help="a GPU for each rank of a node"
    )
    parser.add_argument("--batchsize", "-b", type=int, default=50, help="of each rank")
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
    device = -1
    if args.gpu:
        device = comm.intra_rank
        chainer.cuda.get_device_from_id(device).use()

    np.random.seed(0)  # a run can be repeated
    corpus = (
        make_corpus(args.examples, args.tests, seed=0)
        if comm.rank == 0
        else (None, None)
    )
    train = chainermn.scatter_dataset(corpus[0], comm, shuffle=True, seed=0)
    test = chainermn.scatter_dataset(corpus[1], comm, force_equal_length=False)
    train_iter = chainer.iterators.SerialIterator(train, args.batchsize)
    test_iter = chainer.iterators.SerialIterator(
        test, args.batchsize, repeat=False, shuffle=False
    )

    model = Translator(args.unit)
    if args.gpu:
        model.to_gpu()
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(0.005), comm
    )
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5))

    updater = training.StandardUpdater(
        train_iter, optimizer, converter=convert, device=device
    )
    trainer = training.Trainer(updater, (args.epoch, "epoch"), out=args.out)
    trainer.extend(
        ExactTranslations(
            comm, test_iter, model.translate, device=device, converter=convert
        )
    )
    if comm.rank == 0:
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

    if comm.rank == 0:
        chainer.serializers.save_npz(os.path.join(args.out, "model.npz"), model)
        with chainer.using_config("train", False), chainer.no_backprop_mode():
            found = model.translate(convert(corpus[1][:SHOWN], device)["xs"])
        for (source, target), one in zip(corpus[1], found, strict=False):
            print(
                f"{words_of(source)}\n    {characters_of(one)} ({characters_of(target)})"
            )


if __name__ == "__main__":
    main()

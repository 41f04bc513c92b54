"""The encoder and the decoder; the states of the one's LSTM go to the other's, on another rank."""

from __future__ import annotations

from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainermn.links import create_multi_node_n_step_rnn
from dates import BEGIN, CHARACTERS, END, WORDS

LAYERS = 1


class Encoder(chainer.Chain):
    """Reads the words. What it has understood goes to the rank of the decoder."""

    def __init__(self, comm: Any, n_units: int, decoder: int) -> None:
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(len(WORDS), n_units)
            self.rnn = create_multi_node_n_step_rnn(
                L.NStepLSTM(LAYERS, n_units, n_units, 0.0), comm, rank_out=decoder
            )

    def forward(self, xs: list[Any], ys: list[Any]) -> Any:
        """A delegate variable, whose backward waits for the gradients of the states."""
        return self.encode(xs)

    def encode(self, xs: list[Any]) -> Any:
        *_, delegate = self.rnn(embedded(self.embed, xs))
        return delegate


class Decoder(chainer.Chain):
    """Writes the characters, starting from the states that the encoder ended with."""

    def __init__(self, comm: Any, n_units: int, encoder: int) -> None:
        super().__init__()
        n_characters = len(CHARACTERS) + 2  # BEGIN and END
        with self.init_scope():
            self.embed = L.EmbedID(n_characters, n_units)
            self.rnn = create_multi_node_n_step_rnn(
                L.NStepLSTM(LAYERS, n_units, n_units, 0.0), comm, rank_in=encoder
            )
            self.score = L.Linear(n_units, n_characters)

    def forward(self, xs: list[Any], ys: list[Any]) -> Any:
        """The mean cross entropy of the characters, each told from those before it."""
        before = [self.xp.concatenate([self.xp.array([BEGIN], y.dtype), y]) for y in ys]
        after = [self.xp.concatenate([y, self.xp.array([END], y.dtype)]) for y in ys]
        _, _, hs, _ = self.rnn(embedded(self.embed, before))
        scores, truth = self.score(F.concat(hs, axis=0)), self.xp.concatenate(after)
        loss = F.softmax_cross_entropy(scores, truth)
        chainer.report({"loss": loss, "accuracy": F.accuracy(scores, truth)}, self)
        return loss

    def decode(self, count: int, longest: int) -> list[np.ndarray]:
        """Translations, each character the likeliest after those that were chosen before it.

        Args:
            count: how many sentences the encoder has read.
            longest: how many characters to write at most.
        """
        chosen = self.xp.full(count, BEGIN, np.int32)
        columns, states = [], None
        for _ in range(longest):
            hs = embedded(self.embed, list(chosen[:, None]))
            if states is None:  # the first ones come from the other rank
                hy, cy, hs, _ = self.rnn(hs)
            else:
                hy, cy, hs = self.rnn.actual_rnn(*states, hs)
            states = hy, cy
            chosen = self.score(F.concat(hs, axis=0)).array.argmax(axis=1).astype(np.int32)
            columns.append(chainer.backends.cuda.to_cpu(chosen))
        return [up_to_end(row) for row in np.stack(columns, axis=1)]


def embedded(embed: Any, sequences: list[Any]) -> Any:
    """The vectors of each sequence's numbers, all looked up at once."""
    ends = np.cumsum([len(sequence) for sequence in sequences])
    vectors = embed(embed.xp.concatenate(sequences))
    return F.split_axis(vectors, ends[:-1], axis=0, force_tuple=True)


def up_to_end(row: np.ndarray) -> np.ndarray:
    """The characters before the first END."""
    ends = np.flatnonzero(row == END)
    return row[: ends[0]] if len(ends) else row

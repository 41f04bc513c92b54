"""The encoder and the decoder; the states of the one's LSTM go to the other's, on another rank."""

import chainer
import chainer.functions as F
import chainer.links as L
from chainermn.links import create_multi_node_n_step_rnn
from dates import BEGIN, CHARACTERS, END, WORDS
from sequences import embedded, up_to_end

LAYERS = 1


class Encoder(chainer.Chain):
    """Reads the words. What it has understood goes to the rank of the decoder."""

    def __init__(self, comm, n_units, decoder):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(len(WORDS), n_units)
            self.rnn = create_multi_node_n_step_rnn(
                L.NStepLSTM(LAYERS, n_units, n_units, 0.0), comm, rank_out=decoder
            )

    def forward(self, xs, ys):
        """A delegate variable, whose backward waits for the gradients of the states."""
        return self.encode(xs)

    def encode(self, xs):
        *_, delegate = self.rnn(embedded(self.embed, xs))
        return delegate


class Decoder(chainer.Chain):
    """Writes the characters, starting from the states that the encoder ended with."""

    def __init__(self, comm, n_units, encoder):
        super().__init__()
        n_characters = len(CHARACTERS) + 2  # BEGIN and END
        with self.init_scope():
            self.embed = L.EmbedID(n_characters, n_units)
            self.rnn = create_multi_node_n_step_rnn(
                L.NStepLSTM(LAYERS, n_units, n_units, 0.0), comm, rank_in=encoder
            )
            self.score = L.Linear(n_units, n_characters)

    def forward(self, xs, ys):
        """The mean cross entropy of the characters, each told from those before it."""
        before = [self.xp.append(BEGIN, y).astype(y.dtype) for y in ys]
        after = [self.xp.append(y, END).astype(y.dtype) for y in ys]
        _, _, hs, _ = self.rnn(embedded(self.embed, before))
        scores, truth = self.score(F.concat(hs, axis=0)), self.xp.concatenate(after)
        loss = F.softmax_cross_entropy(scores, truth)
        chainer.report({"loss": loss, "accuracy": F.accuracy(scores, truth)}, self)
        return loss

    def decode(self, count, longest):
        """Translations, each character the likeliest after those that were chosen before it.

        Args:
            count: how many sentences the encoder has read.
            longest: how many characters to write at most.
        """
        chosen = self.xp.full(count, BEGIN, "i")
        columns, states = [], None
        for _ in range(longest):
            hs = embedded(self.embed, list(chosen[:, None]))
            if states is None:  # the first ones come from the other rank
                hy, cy, hs, _ = self.rnn(hs)
            else:
                hy, cy, hs = self.rnn.actual_rnn(*states, hs)
            states = hy, cy
            chosen = self.score(F.concat(hs, axis=0)).array.argmax(axis=1).astype("i")
            columns.append(chosen)
        return up_to_end(columns)

"""What sequences of different lengths take: a converter, embedding, and cutting at the end."""

import chainer
import chainer.functions as F
import numpy as np
from dates import END


def convert(batch, device):
    """The arguments of the models: sequences differ in length, so they stay separate."""
    to_device = chainer.dataset.to_device
    return {
        "xs": [to_device(device, source) for source, _ in batch],
        "ys": [to_device(device, target) for _, target in batch],
    }


def embedded(embed, sequences):
    """The vectors of each sequence's numbers, all looked up at once."""
    ends = np.cumsum([len(sequence) for sequence in sequences])
    vectors = embed(embed.xp.concatenate(sequences))
    return F.split_axis(vectors, ends[:-1], axis=0, force_tuple=True)


def up_to_end(columns):
    """Sequences, each without its first END and what follows; of each place the numbers of all."""
    rows = np.stack(
        [chainer.backends.cuda.to_cpu(column) for column in columns], axis=1
    )
    return [row[: np.append(row, END).tolist().index(END)] for row in rows]

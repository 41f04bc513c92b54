"""The models whose training steps are timed: perceptrons of some width and depth."""

from __future__ import annotations

from typing import Any, NamedTuple

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

from chainermn_modelparallel.links import MultiNodeBatchNormalization


class Perceptron(NamedTuple):
    """What a model is made of, and what one rank computes in a step."""

    widths: tuple[int, ...]  # of its input, its layers and its output
    batch: int  # examples a rank
    normalized: bool = False  # by batch normalization over all ranks

    def make(self, communicator: Any = None) -> Any:
        """Return a classifier with the same weights on all ranks.

        Without a communicator, batch normalization is each rank's own.
        """
        state = np.random.RandomState(0)
        net = chainer.Sequential()
        for layer, (n_in, n_out) in enumerate(
            zip(self.widths, self.widths[1:], strict=False)
        ):
            weights = state.normal(0, n_in**-0.5, (n_out, n_in)).astype("f4")
            net.append(L.Linear(n_in, n_out, initialW=weights))
            if layer < len(self.widths) - 2:
                if self.normalized and communicator is not None:
                    net.append(MultiNodeBatchNormalization(n_out, communicator))
                elif self.normalized:
                    net.append(L.BatchNormalization(n_out))
                net.append(F.relu)
        return L.Classifier(net)

    def examples(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a rank's batch and its labels."""
        state = np.random.RandomState(rank)
        x = state.uniform(0, 1, (self.batch, self.widths[0])).astype("f4")
        return x, state.randint(0, self.widths[-1], self.batch).astype("i4")

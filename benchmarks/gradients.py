"""A model's gradients on one rank: what they start from, and what their mean must be."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import chainer
import numpy as np
from shapes import Shapes, elements

if TYPE_CHECKING:
    from mpi4py import MPI

ROUNDING = 2.0**-24  # relative error of one float32 operation
BLOCK = 1 << 20  # elements that are compared at once


class Gradients:
    """Random gradients of a model, different on each rank.

    Attributes:
        source: what this rank's gradients start from; 1-D float32, all arrays on end.
        peer: the next rank's `source`.
        flat: scratch of the same size.
        grads: an array for each parameter, in memory of its own as Chainer's are.
        mean, bound: the mean over ranks and how far rounding may take it; 1-D float32.
        model: a `chainer.Link` with the parameters.
    """

    def __init__(self, shapes: Shapes, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.shapes = shapes
        self.source = source_of(shapes, comm.rank)
        self.peer = source_of(shapes, (comm.rank + 1) % comm.size)
        # Touched, so that nobody's first call pays for it.
        self.flat = self.source.copy()
        total = np.zeros(self.source.size)
        self.bound = np.zeros_like(self.source)
        for rank in range(comm.size):
            source = source_of(shapes, rank)
            total += source
            self.bound += abs(source)
        total /= comm.size
        self.mean = total.astype(np.float32)
        # Each term is scaled and added, the sum divided, and the mean above rounded.
        self.bound *= (comm.size + 3) * ROUNDING / comm.size
        self.model = chainer.Link()
        with self.model.init_scope():
            for name, shape in shapes.items():
                setattr(
                    self.model, name, chainer.Parameter(np.zeros(shape, np.float32))
                )
        self.params = [getattr(self.model, name) for name in shapes]
        self.grads = [np.ones(shape, np.float32) for shape in shapes.values()]

    def views(self, flat: np.ndarray) -> list[np.ndarray]:
        """The model's arrays as views of a flat one."""
        ends = np.cumsum([grad.size for grad in self.grads])[:-1]
        pieces = zip(np.split(flat, ends), self.grads, strict=True)
        return [piece.reshape(grad.shape) for piece, grad in pieces]

    def restore(self) -> None:
        """Fill the gradients anew, as a backward would."""
        for param, grad, source in zip(
            self.params, self.grads, self.views(self.source), strict=True
        ):
            np.copyto(grad, source)
            param.grad = grad  # a communicator may have put another array there

    def is_mean(self, arrays: list[np.ndarray]) -> bool:
        """Whether these are the mean to float32's rounding, bit-identical on all ranks.

        Collective: every rank asks, and gets the same answer.
        """
        digest = hashlib.sha1()
        close = True
        means, bounds = self.views(self.mean), self.views(self.bound)
        for array, mean, bound in zip(arrays, means, bounds, strict=True):
            digest.update(np.ascontiguousarray(array).data)
            flat, mean, bound = array.reshape(-1), mean.reshape(-1), bound.reshape(-1)
            for start in range(0, flat.size, BLOCK):
                block = slice(start, start + BLOCK)
                near = abs(flat[block] - mean[block]) <= bound[block]
                close &= bool(np.all(near))  # False for NaN, too
        answers = self.comm.allgather((close, digest.digest()))
        return all(answer == (True, digest.digest()) for answer in answers)

    def are_own(self, arrays: list[np.ndarray]) -> bool:
        """Whether these are what this rank's gradients start from, on all ranks (collective)."""
        mine = all(map(np.array_equal, arrays, self.views(self.source)))
        return all(self.comm.allgather(mine))


def source_of(shapes: Shapes, rank: int) -> np.ndarray:
    """What a rank's gradients start from; 1-D float32."""
    return np.random.default_rng(rank).standard_normal(elements(shapes), np.float32)

"""PowerSGD: a matrix of gradients as the product of two thin factors (Vogels et al. 2019)."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...collective_errors import require_integer
from ...host_arrays import to_host
from ..gradient_set import is_updated, present_gradient

# Elements of a block of rows, which stays in a core's cache.
BLOCK_ELEMENTS = 32 << 10
# Of a factor; see `whole`.
MOST_COLUMNS = 32
# The square of a row's length is rounded by about as much: what is left is no direction.
EPSILON = 2.0**-23


@dataclass(frozen=True)
class PowerSGD:
    """How gradients are compressed: a matrix travels as two factors of few columns.

    It is the ``compression`` of :func:`create_multi_node_optimizer`. A gradient of two
    or more dimensions is a matrix, whose rows are the first dimension. Ranks step along
    a product *P Qᵀ* of low rank, which is near the mean of their matrices. What the
    product lacks, the *error*, is added to the next gradient, so it comes later. Each
    rank keeps its own error, in two arrays of the parameter's size. Other gradients
    travel as they are. Making it is not collective, and the same on all ranks. See
    https://arxiv.org/abs/1905.13727.

    Args:
        rank: the number of columns of both factors, up to 32.
        start_step: how many steps a parameter makes before its gradients are
            compressed, since the first ones have no low rank.
        min_ratio: a matrix is compressed only if it has so many times the numbers of
            its factors.
        seed: of the numbers with which the first factors are drawn.

    Raises:
        TypeError: an argument is not a number, or not an integer where it must be.
        ValueError: an argument is out of its range.
    """

    rank: int = 4
    start_step: int = 100
    min_ratio: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_integer("rank", self.rank, 1, MOST_COLUMNS)
        require_integer("start_step", self.start_step, 0)
        require_integer("seed", self.seed, 0)
        if not self.min_ratio >= 0:
            raise ValueError("min_ratio must be at least 0")


def factor_size(settings: PowerSGD, param: Any) -> Any:
    """Return how many numbers the factors have; 0 if a gradient is never compressed."""
    is_real = param.array is not None and param.dtype.kind == "f"
    if not is_real or param.ndim < 2 or not is_updated(param):
        return 0
    rows, columns = shape_of(param)
    size = min(settings.rank, rows, columns) * (rows + columns)
    if settings.min_ratio * size > param.size:
        return 0
    return size


def is_compressed(settings: PowerSGD, param: Any) -> Any:
    """Return whether the parameter's present gradient is compressed."""
    # A rule of the user's own may count nothing.
    steps = getattr(param.update_rule, "t", settings.start_step)
    return steps >= settings.start_step and factor_size(settings, param) > 0


def first_matrix(settings: PowerSGD, name: str, param: Any) -> Matrix:
    """Return the matrix of a parameter by whose ``name`` the first *Q* is drawn."""
    rows, columns = shape_of(param)
    random = np.random.RandomState(zlib.crc32(name.encode(), settings.seed))
    drawn = random.uniform(-1, 1, (min(settings.rank, rows, columns), columns))
    right = orthonormal(drawn.astype(np.float32))
    return Matrix(name, param, right, np.zeros((rows, columns), np.float32))


def shape_of(param: Any) -> tuple[int, int]:
    """Return the shape of a parameter's matrix."""
    return param.shape[0], math.prod(param.shape[1:])


class Matrix:
    """A parameter's gradient as a matrix of float32, without a loss scale.

    To a communicator it looks like a parameter, whose gradient is first *P*, then *Q*.
    Factors are transposed, so that their few rows lie on end in memory.

    Attributes:
        name: of the parameter.
        param: the parameter.
        right: the last *Q* with orthonormal rows, of shape (rank, columns); alike on
            all ranks.
        error: what the last factors lacked of this rank's matrix, of shape (rows,
            columns): the product of *P* and the rank's own *Q* is no part of it.
        data: an array of the shape of *P*.
        grad: the factor that travels; None if this rank has no gradient.
    """

    def __init__(self, name: str, param: Any, right: Any, error: Any) -> None:
        """Go on with copies of these arrays, which are NumPy's."""
        self.name = name
        self.param = param
        self.right = param.xp.array(right)
        self.error = param.xp.array(error)
        self.data = param.xp.empty((len(right), len(error)), np.float32)
        # The gradient and the error; then what becomes the error if there is a step.
        self._sum = param.xp.empty_like(self.error)

    def make_left(self, factor: float) -> None:
        """Add the error to the parameter's gradient times ``factor``, and let *P* travel.

        Without a gradient the sum is the error.
        """
        grad = present_gradient(self.param)
        self.grad = None
        if grad is None:
            self._sum[...] = self.error
        else:
            matrix = grad.reshape(self._sum.shape)
            np.multiply(matrix, factor, out=self._sum, dtype=np.float32)
            self._sum += self.error
            self.grad = (self._sum @ self.right.T).T.copy()

    def make_right(self) -> None:
        """Let *Q* travel, as the mean of *P* is there; allocate the product."""
        self._left = self.param.xp.array(orthonormal(to_host(self.grad)))
        self._own_right = self._left @ self._sum
        self.grad = self._own_right.copy()
        self.param.grad = self.param.xp.empty(self.param.shape, self.param.dtype)

    def multiply(self, scale: float) -> None:
        """Give the parameter the product of the means, times ``scale``; compute the error.

        The product has the same bits on all ranks, see :func:`whole`.
        """
        rows, columns = self._sum.shape
        target = self.param.grad.reshape(rows, columns)
        left = whole(self._left)
        right = whole(self.grad)
        count = max(1, BLOCK_ELEMENTS // columns)
        for start in range(0, rows, count):
            block = slice(start, start + count)
            np.multiply(left[:, block].T @ right, scale, out=target[block])
            self._sum[block] -= self._left[:, block].T @ self._own_right

    def step(self) -> None:
        """Keep the new error, and the mean of *Q* for the next *P*."""
        self.error, self._sum = self._sum, self.error
        rows = orthonormal(to_host(self.grad))
        # Rows of zeros would stay so for ever.
        are_new = rows.any(axis=1, keepdims=True)
        rows = np.where(are_new, rows, to_host(self.right))
        self.right = self.param.xp.array(rows)


def whole(factor: Any) -> Any:
    """Return a factor of float32 as multiples of one unit, in float64.

    No number has more than 24 bits then. The sums of products of two such factors, of up
    to ``MOST_COLUMNS`` terms, have 53 at most: float64 holds them without rounding. So
    they have the same bits in whatever order, on whatever processor, the BLAS adds.
    """
    unit = np.spacing(np.float32(float(abs(factor).max())))
    return np.rint(factor.astype(np.float64) / unit) * unit


def orthonormal(rows: np.ndarray) -> np.ndarray:
    """Return rows made orthonormal by Gram-Schmidt; zeros for a row that depends on others.

    Sums are NumPy's own, whose order is fixed, so that bits depend neither on the
    processor nor on threads.
    """
    found: list[np.ndarray] = []
    for row in rows:
        rest = row
        for other in 2 * found:  # once leaves rounding errors of a long row
            rest = rest - (rest * other).sum() * other
        square = (rest * rest).sum()
        # Neither holds if a number isn't finite.
        if square == 0 or square < EPSILON * (row * row).sum():
            found.append(np.zeros_like(row))
        else:
            found.append(rest / np.sqrt(square))
    return np.array(found)

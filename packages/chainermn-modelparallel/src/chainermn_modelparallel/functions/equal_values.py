"""A check that ranks which divide one model have equal values where they must.

All of them compute the same from the same inputs and parameters, but for those that are
divided. Values that differ never meet in a sum that would show it. So each operation of
``tensor_parallel_ops.py`` compares a projection of the values that go into it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from chainer import backend
from chainer.backends import cuda

from chainermn_comm import RankMismatchError

from .ordered_function import Arrays, Variables

_ADVICE = (
    "ranks that divide a model need the same inputs, and the same values of all parameters "
    "that are not divided. Read the same batches on all of them (create_multi_node_iterator), "
    "seed them alike, and replace hooks that take the norm of one rank's gradients "
    "(GradientClipping, GradientLARS) by chainermn.MultiNodeGradientClipping"
)


def side_by_side(variables: Variables) -> Any:
    """Return the columns of all variables in one array."""
    arrays = [variable.array for variable in variables]
    if len(arrays) == 1:
        return arrays[0]
    return backend.get_array_module(arrays[0]).concatenate(arrays, axis=1)


def project(arrays: Arrays) -> bytes:
    """Return two float64 numbers of each array, 1-D or 2-D: a projection, and the norm.

    The projection depends on each element and its place. Where values differ, it
    differs by about as much as they do.
    """
    if not arrays:
        return b""
    with np.errstate(all="ignore"):  # values that overflow have been warned of
        return b"".join([_projection_and_norm(array).tobytes() for array in arrays])


def _projection_and_norm(array: Any) -> np.ndarray:
    xp = backend.get_array_module(array)
    wide = np.result_type(array.dtype, np.float32)
    matrix = array.astype(wide, copy=False)
    if matrix.ndim == 1:
        matrix = matrix[:, None]
    rows, columns = matrix.shape
    along = xp.cos(xp.arange(rows, dtype=wide))
    across = xp.cos(xp.arange(columns, dtype=wide))
    projection = along @ (matrix @ across)
    numbers = xp.stack([projection, xp.linalg.norm(matrix)])
    return np.asarray(cuda.to_cpu(numbers), np.float64)


def check_equal(
    operation: str, payloads: list[bytes], arrays: Arrays, rank: int
) -> None:
    """Raise RankMismatchError, on all ranks alike, if what they projected differs.

    Values may differ by rounding, since not every device adds in a fixed order: two
    thirds of the digits must be the same.
    """
    if all(payload == payloads[0] for payload in payloads):  # nearly always
        return
    numbers = np.frombuffer(b"".join(payloads)).reshape(len(payloads), len(arrays), 2)
    for index, array in enumerate(arrays):
        projections, norms = numbers[:, index].T
        tolerance = np.finfo(array.dtype).eps ** (2 / 3) * norms.max()
        if not np.allclose(projections, projections[0], 0, tolerance, equal_nan=True):
            raise RankMismatchError(
                f"{operation} on rank {rank}: values of shape {array.shape} differ between "
                f"ranks, where their norms are {norms.tolist()}: {_ADVICE}"
            )

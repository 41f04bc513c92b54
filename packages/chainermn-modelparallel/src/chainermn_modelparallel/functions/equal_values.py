"""A check that ranks which divide one model have equal values outside of the divided region.

Outside of a region, all ranks compute the same values from the same inputs and
parameters. If these values differ, no sum over ranks shows the difference. So each
operation of a region compares projections of the values that it takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from chainer import backend
from chainer.backends import cuda

from chainermn_comm import RankMismatchError

from .control_dependencies import Variables

_ADVICE = (
    "Ranks that divide a model need the same inputs, the same parameters but for those that are "
    "divided, and the same loss scale. Look for one of these causes: ranks read different "
    "batches (use create_multi_node_iterator) or are seeded differently; a link or parameter "
    "was replaced, frozen or loaded on some ranks only; a hook takes the norm of one rank's "
    "gradients (replace GradientClipping and GradientLARS by "
    "chainermn.MultiNodeGradientClipping); loss_scaling() lets each rank adapt a scale of its "
    "own (call chainermn.share_loss_scale)"
)


def project(variables: Variables) -> bytes:
    """Return two float64 numbers of each variable: a projection, and the norm.

    The projection depends on each element and its place. If values differ, their
    projections differ by about as much.
    """
    return b"".join([_projection_and_norm(each.array) for each in variables])


def _projection_and_norm(array: Any) -> bytes:
    xp = backend.get_array_module(array)
    wide = np.result_type(array.dtype, np.float32)
    matrix = array.astype(wide, copy=False).reshape(-1, array.shape[-1])
    along, across = [xp.cos(xp.arange(n, dtype=wide)) for n in matrix.shape]
    with np.errstate(all="ignore"):  # NumPy has already warned of overflows
        projection = along @ (matrix @ across)
        numbers = xp.stack([projection, xp.linalg.norm(matrix)])
    return bytes(cuda.to_cpu(numbers).astype(np.float64))


def check_equal(
    operation: str, payloads: list[bytes], variables: Variables, rank: int
) -> None:
    """Raise RankMismatchError, on all ranks alike, if their projections or norms differ.

    Values may differ by rounding, because not every device adds in a fixed order, and
    so may parameters that were trained with such gradients. So bits are not compared:
    two thirds of the digits must be the same.
    """
    if len(set(payloads)) == 1:  # nearly always
        return
    ranks = np.frombuffer(b"".join(payloads)).reshape(len(payloads), -1, 2)
    for variable, numbers in zip(variables, ranks.swapaxes(0, 1), strict=True):
        norms = numbers[:, 1]
        # Integers have been projected in float32 or wider.
        digits = np.finfo(np.result_type(variable.dtype, np.float16)).eps ** (2 / 3)
        tolerance = digits * norms.min()
        if not np.allclose(numbers, numbers[0], 0, tolerance, equal_nan=True):
            raise RankMismatchError(
                f"{operation} on rank {rank}: {variable.name or 'values'} of shape "
                f"{variable.shape} must be the same on all ranks, but differ: the ranks' norms "
                f"are {norms.tolist()}. {_ADVICE}"
            )

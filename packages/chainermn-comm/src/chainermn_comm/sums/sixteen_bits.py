"""Arrays in 16 bits: in one small sum, all ranks agree on a power of two for each array."""

from __future__ import annotations

import numpy as np

from ..layout import Operand
from ..messaging import Algorithm
from ..numbers import absmax, accumulator, choose_wire_format


def with_exponents(
    algorithm: Algorithm, operand: Operand, sums_travel: bool = False
) -> Operand:
    """Return the 1-D operand with exponents, and dtypes for the wire that hold all sums.

    Arrays are scaled if they travel in fewer bits than they are summed in. Arrays with the
    wire's dtype are scaled only if ``sums_travel``, because their sums may be too large
    for it. If arrays are scaled, the call is collective: the algorithm sums the ranks'
    largest magnitudes, which bounds every number and every sum.
    """
    indices = []
    for index, wire in enumerate(operand.wire_dtypes):
        is_cast = wire != operand.targets[index].dtype
        if wire != accumulator(wire) and (is_cast or sums_travel):
            indices.append(index)
    if not indices:
        return operand
    with np.errstate(all="ignore"):
        bounds = np.array([absmax(operand.sources[index]) for index in indices])
    algorithm.allreduce(Operand([bounds], [bounds], [bounds.dtype]))
    wire_dtypes = list(operand.wire_dtypes)
    exponents = [0] * len(wire_dtypes)
    for index, bound in zip(indices, bounds.tolist(), strict=True):
        wire_format = choose_wire_format(bound, wire_dtypes[index])
        wire_dtypes[index] = wire_format.dtype
        exponents[index] = wire_format.exponent
    return operand._replace(wire_dtypes=wire_dtypes, exponents=exponents)

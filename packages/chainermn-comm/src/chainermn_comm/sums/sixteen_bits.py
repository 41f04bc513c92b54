"""How arrays travel in 16 bits: all ranks agree by one small sum on a power of two for each."""

from __future__ import annotations

import numpy as np

from ..layout import Operand
from ..messaging import Algorithm
from ..numbers import absmax, accumulator, choose_wire_format


def arrays_to_scale(operand: Operand, sums_travel: bool = False) -> list[int]:
    """Return the indices of arrays that travel in fewer bits than they are summed in.

    Arrays that have the wire's dtype themselves are meant only if ``sums_travel``: sums
    of theirs may be too large for it.
    """
    found = []
    for index, wire in enumerate(operand.wire_dtypes):
        is_cast = wire != operand.targets[index].dtype
        if wire != accumulator(wire) and (is_cast or sums_travel):
            found.append(index)
    return found


def with_exponents(
    algorithm: Algorithm, operand: Operand, sums_travel: bool = False
) -> Operand:
    """Return the 1-D operand with exponents, and dtypes for the wire that hold all sums.

    Where arrays are to be scaled this is collective: the algorithm takes the sum of the
    ranks' largest magnitudes, which bounds every number and every sum of them.
    """
    indices = arrays_to_scale(operand, sums_travel)
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

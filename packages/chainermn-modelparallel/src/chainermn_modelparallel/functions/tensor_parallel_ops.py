"""Operations between values that are equal on all ranks and a region that ranks share out.

Ranks that split one model's arithmetic, rather than its data, all compute the same loss
from the same values. So the gradient of a sum over ranks is, for each rank's term, the
sum's own gradient; every rank has a copy of that. The gradient of a value that all
ranks use is the sum of what each of them computes. In ``collectives.py`` every rank's
loss counts instead.

All are collective, backward too, and differentiable any number of times. All but the
last take a function that makes this rank's input; what it raises is raised here, and as
PeerError on the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import chainer.functions as F
from chainer import Variable

from chainermn_comm import CommunicatorBase

from .collective_nodes import Inputs, apply_collective, array_specs


def copy_to_region(
    comm: CommunicatorBase, make_inputs: Callable[[], Inputs]
) -> Variable:
    """Return ``x``, the same on all ranks; backward sums the ranks' gradients."""
    return apply_collective(comm, "copy_to_region", make_inputs)[0]


def reduce_from_region(
    comm: CommunicatorBase, make_inputs: Callable[[], Inputs]
) -> Variable:
    """Return the sum of the ranks' ``x``; backward gives each of them its gradient as it is."""
    return apply_collective(comm, "reduce_from_region", make_inputs)[0]


def split_to_region(
    comm: CommunicatorBase, make_x: Callable[[], Variable], ends: list[int]
) -> Variable:
    """Return this rank's columns of ``x``, the same on all ranks; backward gathers gradients.

    ``x`` has shape ``(N, ends[-1])``, and ``ends`` says where each rank's columns end.
    """

    def make_parts() -> Inputs:
        x = make_x()
        parts = F.split_axis(x, ends[:-1], 1, force_tuple=True)
        return Inputs(parts, signature=array_specs((x,)))

    return apply_collective(comm, "split_to_region", make_parts)[0]


def gather_from_region(comm: CommunicatorBase, x: Variable) -> Variable:
    """Concatenate the ranks' ``x`` of shape ``(N, n)``; backward gives each its own columns."""
    parts = apply_collective(comm, "gather_from_region", lambda: Inputs((x,)))
    return F.concat(parts, axis=1)

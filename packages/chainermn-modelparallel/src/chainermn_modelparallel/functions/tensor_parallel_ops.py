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
from .ordered_function import Variables


def copy_to_region(comm: CommunicatorBase, make_x: Callable[[], Variable]) -> Variable:
    """Return ``x``, the same on all ranks; backward sums the ranks' gradients."""
    return _apply(comm, "copy_to_region", make_x)


def reduce_from_region(
    comm: CommunicatorBase, make_x: Callable[[], Variable]
) -> Variable:
    """Return the sum of the ranks' ``x``; backward gives each of them its gradient as it is."""
    return _apply(comm, "reduce_from_region", make_x)


def split_to_region(
    comm: CommunicatorBase, make_x: Callable[[], Variable], ends: list[int]
) -> Variable:
    """Return this rank's columns of ``x``, the same on all ranks; backward gathers gradients.

    ``x`` has shape ``(N, ends[-1])``, and ``ends`` says where each rank's columns end.
    """
    return _apply(
        comm,
        "split_to_region",
        make_x,
        lambda x: F.split_axis(x, ends[:-1], 1, force_tuple=True),
    )


def gather_from_region(comm: CommunicatorBase, x: Variable) -> Variable:
    """Concatenate the ranks' ``x`` of shape ``(N, n)``; backward gives each its own columns."""
    return F.concat(
        apply_collective(comm, "gather_from_region", lambda: Inputs((x,))), axis=1
    )


def _apply(
    comm: CommunicatorBase,
    op: str,
    make_x: Callable[[], Variable],
    split: Callable[[Variable], Variables] = lambda x: (x,),
) -> Variable:
    def make_inputs() -> Inputs:
        x = make_x()
        return Inputs(split(x), signature=array_specs((x,)))

    return apply_collective(comm, op, make_inputs)[0]

"""Functions for values that all ranks hold alike, whose loss is counted once.

Ranks that split one model's arithmetic, rather than its data, all compute the same loss from the
same values. So the gradient of a sum over ranks is, for each rank's term, the sum's own gradient,
of which every rank has a copy; and the gradient of a value that all ranks use is the sum of what
each of them finds. In ``collectives.py`` every rank's loss counts instead.

All are collective, backward too, and differentiable any number of times.
"""

from __future__ import annotations

import chainer.functions as F
from chainer import Variable

from chainermn_comm import CommunicatorBase

from .collective_ops import carry_out
from .consensus import Form, View


def use_everywhere(
    comm: CommunicatorBase, x: Variable, problem: BaseException | None = None
) -> Variable:
    """``x`` as it is, the same on all ranks; backward adds up the ranks' gradients."""
    return carry_out(comm, "copy", (x,), view=_view("use_everywhere", x), problem=problem)[0]


def total(comm: CommunicatorBase, x: Variable, problem: BaseException | None = None) -> Variable:
    """The sum of the ranks' ``x``; backward gives each of them its gradient as it is."""
    return carry_out(comm, "total", (x,), view=_view("total", x), problem=problem)[0]


def join(comm: CommunicatorBase, x: Variable) -> Variable:
    """The ranks' ``x``, of shape ``(N, n)``, side by side; backward gives each its own columns."""
    return F.concat(carry_out(comm, "join", (x,)), axis=1)


def pick(
    comm: CommunicatorBase, x: Variable, ends: list[int], problem: BaseException | None = None
) -> Variable:
    """This rank's columns of ``x``, the same on all ranks; backward joins the ranks' gradients.

    Args:
        comm: the ranks.
        x: of shape ``(N, ends[-1])``.
        ends: where each rank's columns end.
        problem: why this rank can't take part, with anything for ``x``; raised on all ranks.
    """
    parts = F.split_axis(x, ends[:-1], axis=1, force_tuple=True) if problem is None else None
    return carry_out(comm, "pick", parts, view=_view("pick", x), problem=problem)[0]


def _view(operation: str, x: Variable | None) -> View:
    form = "none" if x is None else Form(x.dtype, x.shape)
    return (("operation", operation), ("dtype and shape of x", form))

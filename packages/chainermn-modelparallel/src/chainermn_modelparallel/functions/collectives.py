"""Collective communication that gradients flow back through.

Every function is collective, and so is its backward, unless no rank needs a gradient:

- The loss that is differentiated is the sum of the losses from which the ranks start
  backward. So a variable that one rank gives to several gets the sum of their
  gradients.
- Once an input needs a gradient on any rank, backward has to come to the function on
  every rank, and to several functions in the same order; one ``backward`` comes to them
  in the reverse of the order in which they were called. A result without a gradient
  counts as having one of zeros; but a rank where backward doesn't reach the function at
  all keeps the others waiting, until it calls something else on the same communicator
  (then all raise) or ``CHAINERMN_TIMEOUT`` is over. Where a rank's loss depends on none
  of the results, connect one to it: ``loss = pseudo_connect(result, loss)``.
- Gradients can be differentiated again (``enable_double_backprop=True``, on all ranks).
- TypeError says that ``comm`` is no communicator, or that an argument is no variable or
  array where one must be given. ValueError says that a rank doesn't exist, that
  variables are not initialised, or that their number or shapes are not those described.
  The other ranks then raise PeerError. All ranks raise RankMismatchError if they call
  different functions, or if arguments differ that must be equal. Backward raises it if
  a gradient is needed and some rank called the function in ``no_backprop_mode``.
- Nothing is converted: each array and each gradient is sent in its own dtype. Sums are
  taken in float32 or wider and rounded once, by the communicators of
  ``create_communicator``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from chainer import Variable

from chainermn_comm import CommunicatorBase
from chainermn_comm.numbers import integer_between, one_for_each

from .arguments import check_variable
from .collective_nodes import Inputs, apply_collective, array_specs
from .control_dependencies import Variables


def bcast(comm: CommunicatorBase, x: Any = None, root: int = 0) -> Variable:
    """Give the root's variable to every rank (collective).

    Backward gives the root's ``x`` the sum of all ranks' gradients. A rank's own result
    keeps the way there even if that rank gave nothing.

    Args:
        comm: the communicator.
        x: at the root, a variable or an array of any shape and dtype. Elsewhere the
            value is not used, and ``x`` may be None; a variable gets a gradient of
            zeros, and is where a second backward starts.
        root: the rank whose variable is given, the same on all ranks.

    Returns:
        A variable with the shape and dtype of the root's.
    """
    return _apply_from_root(
        comm, "bcast", x, root, lambda: (check_variable("x", x, comm.rank),)
    )


def gather(comm: CommunicatorBase, x: Any, root: int = 0) -> Any:
    """Collect every rank's variable at the root (collective).

    Backward gives each rank's ``x`` the gradient of its part.

    Args:
        comm: the communicator.
        x: a variable or an array of any shape and dtype; they may differ between ranks.
        root: where to, the same on all ranks.

    Returns:
        The root gets a tuple of ``comm.size`` variables in rank order, its own
        included. The other ranks get None. But if some rank's ``x`` needs a gradient,
        they get a delegate variable like that of :func:`send` (float32 of shape
        ``(0,)``), because the gradient can only come back if backward starts there,
        too: call its ``backward``, or connect it to this rank's loss with
        :func:`pseudo_connect`.
    """

    def make_inputs() -> Inputs:
        return Inputs(
            (check_variable("x", x, comm.rank),), root=_check_root(comm, root)
        )

    results = apply_collective(comm, "gather", make_inputs)
    if comm.rank == root:
        return results
    return next(iter(results), None)


def scatter(
    comm: CommunicatorBase, xs: Sequence[Any] | None = None, root: int = 0
) -> Variable:
    """Give the root's i-th variable to rank i (collective).

    Backward gives each of the root's variables the gradient of the rank that it went
    to.

    Args:
        comm: the communicator.
        xs: at the root, a tuple or list of ``comm.size`` variables or arrays, whose
            shapes and dtypes may differ, or one variable or array with as many rows.
            Elsewhere the values are not used, and ``xs`` may be None; variables get
            gradients of zeros, and are where a second backward starts.
        root: the rank whose variables are scattered, the same on all ranks.

    Returns:
        A variable with the shape and dtype of the one that is for this rank.
    """
    return _apply_from_root(comm, "scatter", xs, root, lambda: _one_per_rank(comm, xs))


def alltoall(comm: CommunicatorBase, xs: Sequence[Any]) -> Variables:
    """Give the i-th variable of each rank to rank i (collective).

    Backward gives each variable the gradient of the rank that it went to.

    Args:
        comm: the communicator.
        xs: a tuple or list of ``comm.size`` variables or arrays, whose shapes and
            dtypes may differ, or one variable or array with as many rows.

    Returns:
        ``comm.size`` variables, the i-th from rank i.
    """
    return apply_collective(comm, "alltoall", lambda: Inputs(_one_per_rank(comm, xs)))


def allgather(comm: CommunicatorBase, x: Any) -> Variables:
    """Give every rank's variable to every rank (collective).

    Backward gives ``x`` the sum of the gradients that its copies have on all ranks.

    Args:
        comm: the communicator.
        x: a variable or an array of any shape and dtype; they may differ between ranks.

    Returns:
        ``comm.size`` variables in rank order, this rank's own included.
    """
    return apply_collective(
        comm, "allgather", lambda: Inputs((check_variable("x", x, comm.rank),))
    )


def allreduce(comm: CommunicatorBase, x: Any, op: str = "sum") -> Variable:
    """Return the sum or the mean of all ranks' variables, on every rank (collective).

    Backward gives ``x`` the sum (or the mean) of the gradients that the result has on
    all ranks.

    Args:
        comm: the communicator.
        x: a variable or an array, of the same shape and dtype on all ranks; floats for
            a mean.
        op: ``"sum"`` or ``"mean"``, the same on all ranks.

    Returns:
        A variable of the same shape and dtype.
    """

    def make_inputs() -> Inputs:
        if op not in ("sum", "mean"):
            raise ValueError(
                f'rank {comm.rank}: op must be "sum" or "mean", got {op!r}'
            )
        variables = (check_variable("x", x, comm.rank),)
        return Inputs(variables, signature=(("op", op), *array_specs(variables)))

    return apply_collective(comm, op, make_inputs, "allreduce")[0]


def reduce_scatter(comm: CommunicatorBase, xs: Sequence[Any]) -> Variable:
    """Return the sum over ranks of the variables that they have for this rank (collective).

    Backward gives each ``xs[i]`` the gradient that the result has on rank i.

    Args:
        comm: the communicator.
        xs: a tuple or list of ``comm.size`` variables or arrays, or one with as many
            rows; ``xs[i]``, which goes into rank i's sum, has the same shape and dtype
            on all ranks.

    Returns:
        A variable of the shape and dtype of ``xs[comm.rank]``. Only NCCL doesn't sum in
        rank order.
    """

    def make_inputs() -> Inputs:
        variables = _one_per_rank(comm, xs)
        return Inputs(variables, signature=array_specs(variables))

    return apply_collective(comm, "reduce_scatter", make_inputs)[0]


def _apply_from_root(
    comm: CommunicatorBase, op: str, x: Any, root: Any, check: Callable[[], Variables]
) -> Variable:
    """Apply an operation that takes only the root's inputs; ``check`` returns them there."""

    def make_inputs() -> Inputs:
        index = _check_root(comm, root)
        if comm.rank == index:
            return Inputs(check(), root=index)
        others = x if isinstance(x, (tuple, list)) else (x,)
        control = tuple(
            v for v in others if isinstance(v, Variable) and v.array is not None
        )
        return Inputs((), control, index)

    return apply_collective(comm, op, make_inputs)[0]


def _check_root(comm: CommunicatorBase, root: Any) -> int:
    """Return the root as an int; raise ValueError unless it is one of the ranks."""
    return integer_between(root, 0, comm.size - 1, f"rank {comm.rank}: root")


def _one_per_rank(comm: CommunicatorBase, xs: Any) -> Variables:
    """Return the user's argument as one variable for each rank; raise if it doesn't have them."""
    items = one_for_each(xs, comm.rank, comm.size)
    return tuple(
        check_variable(f"xs[{index}]", x, comm.rank) for index, x in enumerate(items)
    )

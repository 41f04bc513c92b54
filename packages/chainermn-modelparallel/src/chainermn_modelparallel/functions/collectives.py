"""Differentiable collective communication.

Every function is collective, and so is its backward, unless no rank needs a gradient:

- Backward differentiates the sum of the losses from which ranks start backward. So a
  variable that one rank gives to several ranks gets the sum of their gradients.
- If an input needs a gradient on any rank, backward must reach the function on every
  rank, and several functions in the same order: a ``backward`` visits functions in the
  reverse of the order in which they were called. A result without a gradient counts as
  having a gradient of zeros. If backward doesn't reach the function on some rank, the
  other ranks wait until that rank makes another call on the same communicator (then
  all raise), or until ``CHAINERMN_TIMEOUT``. If a rank's loss depends on none of the
  results, connect one to it: ``loss = pseudo_connect(result, loss)``.
- Gradients can be differentiated again (``enable_double_backprop=True`` on all ranks).
- TypeError is raised if ``comm`` is no communicator, or if an argument is no variable or
  array. ValueError is raised if a rank doesn't exist, if variables are not initialised,
  or if their number or shapes are wrong. The other ranks then raise PeerError. All
  ranks raise RankMismatchError if they call different functions, or if arguments differ
  that must be equal. Backward raises it if a gradient is needed and some rank called
  the function in ``no_backprop_mode``.
- Nothing is converted: each array and each gradient travels in its own dtype. The
  communicators of ``create_communicator`` take sums in float32 or wider, and round once.
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

    Backward gives the root's ``x`` the sum of all ranks' gradients.

    Args:
        comm: the communicator.
        x: at the root, a variable or an array of any shape and dtype. On other ranks
            ``x`` may be None, and its value is not used; a variable gets a gradient of
            zeros, from which a second backward can start.
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
        x: a variable or an array of any shape and dtype, which may differ between
            ranks.
        root: the rank that collects, the same on all ranks.

    Returns:
        At the root a tuple of ``comm.size`` variables in rank order, its own included.
        On other ranks None, if no rank's ``x`` needs a gradient. Otherwise other ranks
        get a delegate variable like that of :func:`send` (float32 of shape ``(0,)``),
        from which backward must start there: call its ``backward``, or connect it to
        the rank's loss by :func:`pseudo_connect`.
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

    Backward gives each of the root's variables the gradient from the rank that received
    it.

    Args:
        comm: the communicator.
        xs: at the root, a tuple or list of ``comm.size`` variables or arrays, whose
            shapes and dtypes may differ, or one variable or array with ``comm.size``
            rows. On other ranks ``xs`` may be None, and its values are not used;
            variables get gradients of zeros, from which a second backward can start.
        root: the rank whose variables are scattered, the same on all ranks.

    Returns:
        A variable with the shape and dtype of the root's variable for this rank.
    """
    return _apply_from_root(comm, "scatter", xs, root, lambda: _one_per_rank(comm, xs))


def alltoall(comm: CommunicatorBase, xs: Sequence[Any]) -> Variables:
    """Give the i-th variable of each rank to rank i (collective).

    Backward gives each variable the gradient from the rank that received it.

    Args:
        comm: the communicator.
        xs: a tuple or list of ``comm.size`` variables or arrays, whose shapes and
            dtypes may differ, or one variable or array with ``comm.size`` rows.

    Returns:
        A tuple of ``comm.size`` variables, the i-th from rank i.
    """
    return apply_collective(comm, "alltoall", lambda: Inputs(_one_per_rank(comm, xs)))


def allgather(comm: CommunicatorBase, x: Any) -> Variables:
    """Give every rank's variable to every rank (collective).

    Backward gives ``x`` the sum of the gradients of its copies on all ranks.

    Args:
        comm: the communicator.
        x: a variable or an array of any shape and dtype, which may differ between
            ranks.

    Returns:
        A tuple of ``comm.size`` variables in rank order, this rank's own included.
    """
    return apply_collective(
        comm, "allgather", lambda: Inputs((check_variable("x", x, comm.rank),))
    )


def allreduce(comm: CommunicatorBase, x: Any, op: str = "sum") -> Variable:
    """Return the sum or the mean of all ranks' variables, on every rank (collective).

    Backward gives ``x`` the sum (or the mean) of the gradients of the result on all
    ranks.

    Args:
        comm: the communicator.
        x: a variable or an array, with the same shape and dtype on all ranks; floats for
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
    """Return the sum of all ranks' ``xs[comm.rank]`` (collective).

    Backward gives each ``xs[i]`` the gradient of the result on rank i.

    Args:
        comm: the communicator.
        xs: a tuple or list of ``comm.size`` variables or arrays, or one variable or
            array with ``comm.size`` rows. Each ``xs[i]``, a part of rank i's sum, has
            the same shape and dtype on all ranks.

    Returns:
        A variable with the shape and dtype of ``xs[comm.rank]``. Sums are taken in rank
        order, except by NCCL.
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
    """Return the user's argument as a tuple with a variable for each rank, or raise."""
    items = one_for_each(xs, comm.rank, comm.size)
    return tuple(
        check_variable(f"xs[{index}]", x, comm.rank) for index, x in enumerate(items)
    )

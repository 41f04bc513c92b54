"""Collective communication that gradients flow back through.

Every function is collective, and so is its backward, unless no rank needs a gradient:

- The loss that is differentiated is the sum of the losses from which the ranks start backward. So
  what one rank gives to several gets the sum of their gradients.
- Once an input needs a gradient on any rank, backward has to come to the function on every rank,
  and to several functions in the same order; one ``backward`` comes to them in the reverse of the
  order in which they were called. A result without a gradient counts as having one of zeros; but
  a rank where backward doesn't come by at all keeps the others waiting, until it calls something
  else on the same communicator (then all raise) or ``CHAINERMN_TIMEOUT`` is over. Where a rank's
  loss depends on none of the results, connect one to it: ``loss = pseudo_connect(result, loss)``.
- Gradients can be differentiated again (``enable_double_backprop=True``, on all ranks).
- Nothing is converted: each array and each gradient travels in its own dtype. Sums are taken in
  float32 or wider and rounded once, by the communicators of ``create_communicator``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chainer
from chainer import Variable

from chainermn_comm import CommunicatorBase

from .collective_ops import carry_out
from .consensus import Form, View, attempt, check_root, require_communicator

Variables = tuple[Variable, ...]


def bcast(comm: CommunicatorBase, x: Any = None, root: int = 0) -> Variable:
    """Give the root's variable to every rank (collective).

    Backward gives the root's ``x`` the sum of all ranks' gradients. A rank's own result keeps the
    way there even if that rank gave nothing.

    Args:
        comm: the communicator.
        x: at the root, a variable or an array of any shape and dtype. Elsewhere its value is not
            used and it may be None; a variable gets a gradient of zeros, and is where a second
            backward starts.
        root: the rank whose variable is given, the same on all ranks.

    Returns:
        A variable with the shape and dtype of the root's.

    Raises:
        TypeError: ``comm`` is no communicator, or the root's ``x`` no variable or array.
        ValueError: there is no rank ``root``, or the root's ``x`` is not initialised.
        PeerError: another rank raised one of these.
        RankMismatchError: on all ranks, when they call different functions, roots differ, or
            some build a graph and others don't.
    """
    return _rooted(comm, "bcast", x, root, lambda: (_variable(comm, "x", x),))[0]


def gather(comm: CommunicatorBase, x: Any, root: int = 0) -> Any:
    """Collect every rank's variable at the root (collective).

    Backward gives each rank's ``x`` the gradient of its part.

    Args:
        comm: the communicator.
        x: a variable or an array of any shape and dtype; they may differ between ranks.
        root: where to, the same on all ranks.

    Returns:
        At the root a tuple of ``comm.size`` variables in rank order, its own included. Elsewhere
        None; but if some rank's ``x`` needs a gradient, a delegate variable as that of
        :func:`send` (float32 of shape ``(0,)``), because that gradient can only come back if
        backward starts here too: call its ``backward``, or connect it to this rank's loss with
        :func:`pseudo_connect`.

    Raises:
        TypeError: ``comm`` is no communicator, or ``x`` no variable or array.
        ValueError: there is no rank ``root``, or ``x`` is not initialised.
        PeerError: another rank raised one of these.
        RankMismatchError: as for :func:`bcast`.
    """
    require_communicator(comm)
    found, problem = attempt(lambda: (check_root(comm, root), (_variable(comm, "x", x),)))
    index, variables = found or (-1, None)
    results = carry_out(comm, "gather", variables, index, problem=problem)
    if comm.rank == index:
        return results
    return results[0] if results else None


def scatter(comm: CommunicatorBase, xs: Sequence[Any] | None = None, root: int = 0) -> Variable:
    """Give the root's i-th variable to rank i (collective).

    Backward gives each of the root's variables the gradient of the rank that it went to.

    Args:
        comm: the communicator.
        xs: at the root, a tuple or list of ``comm.size`` variables or arrays; shapes and dtypes
            may differ. Elsewhere the values are not used and it may be None; variables get
            gradients of zeros, and are where a second backward starts.
        root: the rank whose variables are dealt out, the same on all ranks.

    Returns:
        A variable with the shape and dtype of the one that is for this rank.

    Raises:
        TypeError: ``comm`` is no communicator, or the root's ``xs`` no tuple or list of variables
            or arrays.
        ValueError: there is no rank ``root``, or the root's ``xs`` are not ``comm.size``
            initialised variables.
        PeerError: another rank raised one of these.
        RankMismatchError: as for :func:`bcast`.
    """
    return _rooted(comm, "scatter", xs, root, lambda: _one_each(comm, xs))[0]


def alltoall(comm: CommunicatorBase, xs: Sequence[Any]) -> Variables:
    """Give the i-th variable of each rank to rank i (collective).

    Backward gives each variable the gradient of the rank that it went to.

    Args:
        comm: the communicator.
        xs: a tuple or list of ``comm.size`` variables or arrays; shapes and dtypes may differ.

    Returns:
        ``comm.size`` variables, the i-th from rank i.

    Raises:
        TypeError: ``comm`` is no communicator, or ``xs`` no tuple or list of variables or arrays.
        ValueError: ``xs`` are not ``comm.size`` initialised variables.
        PeerError: another rank raised one of these.
        RankMismatchError: as for :func:`bcast`.
    """
    require_communicator(comm)
    variables, problem = attempt(lambda: _one_each(comm, xs))
    return carry_out(comm, "alltoall", variables, problem=problem)


def allgather(comm: CommunicatorBase, x: Any) -> Variables:
    """Give every rank's variable to every rank (collective).

    Backward gives ``x`` the sum of the gradients that its copies have on all ranks.

    Args:
        comm: the communicator.
        x: a variable or an array of any shape and dtype; they may differ between ranks.

    Returns:
        ``comm.size`` variables in rank order, this rank's own included.

    Raises:
        TypeError: ``comm`` is no communicator, or ``x`` no variable or array.
        ValueError: ``x`` is not initialised.
        PeerError: another rank raised one of these.
        RankMismatchError: as for :func:`bcast`.
    """
    require_communicator(comm)
    variables, problem = attempt(lambda: (_variable(comm, "x", x),))
    return carry_out(comm, "allgather", variables, problem=problem)


def allreduce(comm: CommunicatorBase, x: Any, op: str = "sum") -> Variable:
    """The sum or the mean of all ranks' variables, on every rank (collective).

    Backward gives ``x`` the sum (or the mean) of the gradients that the result has on all ranks.

    Args:
        comm: the communicator.
        x: a variable or an array, of the same shape and dtype on all ranks; floats for a mean.
        op: ``"sum"`` or ``"mean"``.

    Returns:
        A variable of the same shape and dtype.

    Raises:
        TypeError: ``comm`` is no communicator, ``x`` no variable or array, or a mean is asked for
            of something that is not floats.
        ValueError: ``op`` is another one, or ``x`` is not initialised.
        PeerError: another rank raised one of these.
        RankMismatchError: as for :func:`bcast`, and when shapes, dtypes or ``op`` differ.
    """
    require_communicator(comm)

    def prepare() -> Variables:
        if op not in ("sum", "mean"):
            raise ValueError(f'rank {comm.rank}: op must be "sum" or "mean", got {op!r}')
        variable = _variable(comm, "x", x)
        if op == "mean" and variable.dtype.kind != "f":
            raise TypeError(f"rank {comm.rank}: the mean is taken of floats, got {variable.dtype}")
        return (variable,)

    variables, problem = attempt(prepare)
    view: View = (("operation", "allreduce"), ("op", op), *_forms(variables))
    verb = "mean" if op == "mean" else "allreduce"
    return carry_out(comm, verb, variables, view=view, problem=problem)[0]


def reduce_scatter(comm: CommunicatorBase, xs: Sequence[Any]) -> Variable:
    """The sum over ranks of the variables that they have for this rank (collective).

    Backward gives each ``xs[i]`` the gradient that the result has on rank i.

    Args:
        comm: the communicator.
        xs: a tuple or list of ``comm.size`` variables or arrays; ``xs[i]``, which goes into rank
            i's sum, has the same shape and dtype on all ranks.

    Returns:
        A variable of the shape and dtype of ``xs[comm.rank]``, summed in rank order.

    Raises:
        TypeError: ``comm`` is no communicator, or ``xs`` no tuple or list of variables or arrays.
        ValueError: ``xs`` are not ``comm.size`` initialised variables.
        PeerError: another rank raised one of these.
        RankMismatchError: as for :func:`bcast`, and when shapes or dtypes differ.
    """
    require_communicator(comm)
    variables, problem = attempt(lambda: _one_each(comm, xs))
    view: View = (("operation", "reduce_scatter"), *_forms(variables))
    return carry_out(comm, "reduce_scatter", variables, view=view, problem=problem)[0]


def _rooted(
    comm: CommunicatorBase, verb: str, x: Any, root: int, make: Callable[[], Variables]
) -> Variables:
    """Call a verb whose inputs count at the root alone, where ``make`` checks them."""
    require_communicator(comm)
    index, problem = attempt(lambda: check_root(comm, root))
    variables: Variables | None = None
    bystanders: Variables = ()
    if comm.rank == index:
        variables, problem = attempt(make)
    else:
        each = x if isinstance(x, (tuple, list)) else (x,)
        bystanders = tuple(v for v in each if isinstance(v, Variable) and v.array is not None)
    return carry_out(comm, verb, variables, index or 0, problem=problem, bystanders=bystanders)


def _variable(comm: CommunicatorBase, name: str, x: Any) -> Variable:
    """What the user gave, checked, as a variable."""
    if not isinstance(x, (Variable, *chainer.get_array_types())):
        raise TypeError(
            f"rank {comm.rank}: {name} must be a variable or an array, got {type(x).__name__}"
        )
    variable = chainer.as_variable(x)
    if variable.array is None:
        raise ValueError(
            f"rank {comm.rank}: {name} is a parameter that is not initialised yet "
            f"({variable.name or 'it has no name'})"
        )
    if variable.dtype.hasobject:
        raise TypeError(f"rank {comm.rank}: {name} holds Python objects; only numbers can be sent")
    return variable


def _one_each(comm: CommunicatorBase, xs: Any) -> Variables:
    """What the user gave, checked, as one variable for each rank."""
    if not isinstance(xs, (tuple, list)):
        raise TypeError(
            f"rank {comm.rank}: xs must be a tuple or list of {comm.size} variables, one for each "
            f"rank, got {type(xs).__name__}"
        )
    if len(xs) != comm.size:
        raise ValueError(
            f"rank {comm.rank}: xs must hold {comm.size} variables, one for each rank, got "
            f"{len(xs)}"
        )
    return tuple(_variable(comm, f"xs[{index}]", x) for index, x in enumerate(xs))


def _forms(variables: Variables | None) -> View:
    """The entries of a view that make dtypes and shapes equal on all ranks."""
    return tuple(
        (f"dtype and shape of variable {index}", Form(variable.dtype, variable.shape))
        for index, variable in enumerate(variables or ())
    )

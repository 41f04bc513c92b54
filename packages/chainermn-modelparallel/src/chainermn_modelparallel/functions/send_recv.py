"""`send` and `recv`: edges of the computational graph from one rank to another."""

from __future__ import annotations

from typing import Any

from chainer import Variable

from chainermn_comm import CommunicatorBase
from chainermn_comm.numbers import wrong_kind

from .arguments import check_edge, check_variable
from .cancellation import NO_BACKPROP, send_cancellation, send_pending_cancellations
from .control_dependencies import Variables, keep_control_dependencies
from .edge_functions import RecvFunction, SendFunction, make_outputs
from .messages import Header, message_ids, receive_message
from .ordered_function import SCOPE, requires_grad_mask


def send(x: Any, communicator: CommunicatorBase, rank: int, tag: int = 0) -> Variable:
    """Send variables to another rank, which calls :func:`recv`.

    The call is not collective: only the two ranks take part. ``backward`` of the result
    waits for the gradients from the other rank and continues with them, so the other
    rank must run backward, too. It sends no gradients for variables that need none on
    this rank: arrays, integers, variables with ``requires_grad=False``, and all
    variables in ``chainer.no_backprop_mode()``.

    A ``backward`` visits sends, receives and collective functions in the reverse of the
    order in which they were called. If there are several calls of ``backward``, make
    them in the reverse order of the sends, on both ranks. Each gradient reaches its
    send in any order, but a rank that sends large data or gradients waits until the
    other rank receives them. Two ranks that both send first wait for each other, which
    is reported at ``CHAINERMN_TIMEOUT``: let one rank receive first, or use
    :func:`~chainermn.functions.alltoall` for exchanges among all ranks.

    Args:
        x: a variable or an array, or a tuple or list of these, with any shapes, memory
            orders and dtypes. Nothing is converted.
        communicator: a communicator that has both ranks.
        rank: the receiving rank.
        tag: an int from 0 on that distinguishes messages between the same two ranks.

    Returns:
        A delegate variable without data (float32 of shape ``(0,)``), from which backward
        starts. Keep it: make it the ``delegate_variable`` of the next :func:`recv` or of
        :func:`pseudo_connect`, or call its ``backward``. A ``RuntimeWarning`` appears if
        the delegate variable is dropped although gradients will come back.

    Raises:
        TypeError: an argument has the wrong type, arrays of CPU and GPU are mixed, or an
            array holds Python objects.
        ValueError: there is no such rank or tag, ``x`` is empty, or a parameter in it is
            not initialised. Nothing has been sent then, and the other rank still waits.
        RankMismatchError: the other rank called ``recv`` in
            ``chainer.no_backprop_mode()``, or dropped its result; raised by ``backward``
            of the delegate variable.
    """
    return send_variables(x, communicator, rank, tag)


def send_variables(
    x: Any,
    communicator: CommunicatorBase,
    rank: int,
    tag: int = 0,
    delegate: Variable | None = None,
) -> Variable:
    """Send as :func:`send` does; backward of the result continues to the delegate, too."""
    edge = check_edge(communicator, rank, tag)
    items = x if isinstance(x, (tuple, list)) else (x,)
    if not items:
        raise ValueError(
            f"rank {communicator.rank}: there is nothing to send: x is empty"
        )
    variables = tuple([check_variable("x", item, communicator.rank) for item in items])
    variables = keep_control_dependencies((delegate,), variables)
    send_pending_cancellations(communicator)
    header = Header(next(message_ids), requires_grad_mask=requires_grad_mask(variables))
    node = SendFunction(edge, header, SCOPE + "send")
    (delegate_variable,) = node.apply(variables)
    node.backward_expected = bool(header.needed)
    return delegate_variable


def recv(
    communicator: CommunicatorBase,
    rank: int,
    delegate_variable: Variable | None = None,
    tag: int = 0,
    force_tuple: bool = False,
) -> Any:
    """Receive the variables that another rank sends with :func:`send`.

    The call is not collective: only the two ranks take part. ``backward`` of the result
    sends the gradients to the other rank if it needs them, and then continues to
    ``delegate_variable``. A received variable without a gradient counts as having a
    gradient of zeros. If there are several calls of ``backward``, make them in the
    reverse order of the sends, as for :func:`send`.

    The gradient itself can be differentiated, with ``enable_double_backprop=True`` on
    both ranks. This rank's second backward then starts from the gradient of
    ``delegate_variable``. Without a ``delegate_variable``, a second backward through
    these gradients raises RankMismatchError on the other rank.

    Args:
        communicator: a communicator that has both ranks.
        rank: the sending rank.
        delegate_variable: the variable that backward of the result visits afterwards:
            usually the result of this rank's last :func:`send`.
        tag: the tag of the sender's call.
        force_tuple: whether to return a tuple even of one variable.

    Returns:
        A variable, or a tuple of variables if several were sent, with new arrays of the
        shapes and dtypes that were sent. A variable that needs no gradient at the sender
        needs none here, unless it leads backward to a ``delegate_variable``. In
        ``chainer.no_backprop_mode()`` no variable needs a gradient; if the sender is not
        in this mode, ``backward`` of its delegate variable raises RankMismatchError
        there.

    Raises:
        TypeError: an argument has the wrong type, or the other rank sent something else
            with this tag, which is discarded.
        ValueError: there is no such rank or tag.
    """
    outputs, _ = recv_variables(communicator, rank, delegate_variable, tag)
    if len(outputs) == 1 and not force_tuple:
        return outputs[0]
    return outputs


def recv_variables(
    communicator: CommunicatorBase,
    rank: int,
    delegate_variable: Variable | None = None,
    tag: int = 0,
) -> tuple[Variables, RecvFunction | None]:
    """Return the result of :func:`recv` as a tuple, and the function that sends the gradients.

    The function is None if there are neither gradients to send nor a delegate variable to
    continue to.
    """
    edge = check_edge(communicator, rank, tag)
    if delegate_variable is not None and not isinstance(delegate_variable, Variable):
        raise wrong_kind(
            "delegate_variable must be a chainer.Variable",
            delegate_variable,
            communicator.rank,
        )
    send_pending_cancellations(communicator)
    message = receive_message(edge)
    header = message.header
    variables, node = make_outputs(message, edge, delegate_variable)
    if node is not None:
        node.backward_expected = bool(header.needed)
    elif header.needed:  # the sender would wait for ever
        send_cancellation(communicator, edge.peer, header.message_id, NO_BACKPROP)
    return variables, node

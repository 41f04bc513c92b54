"""`recv`: one end of an edge of the computational graph from another rank to this one.

Backward of a receive sends the gradients, by a send if they can be differentiated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from chainer import Variable

from chainermn_comm import CommunicatorBase, RankMismatchError

from .cancellation import (
    NO_BACKPROP,
    send_cancellation,
    send_pending_cancellations,
    warn_dropped_recv,
)
from .control_dependencies import (
    connect_all,
    delegate_on_device_of,
    keep_control_dependencies,
    zeros_for_input,
)
from .messages import NO_REPLY, Message, check_peer, make_header, receive_message, send_message
from .ordered_function import (
    EMPTY,
    SCOPE,
    OrderedFunctionNode,
    chainer_config,
    empty_on_device_of,
    make_variable,
    requires_grad_mask,
)
from .send_function import SendFunction, message_ids


def recv(
    communicator: CommunicatorBase,
    rank: int,
    delegate_variable: Variable | None = None,
    tag: int = 0,
    force_tuple: bool = False,
) -> Any:
    """Receive the variables that another rank sends with :func:`send`.

    Not collective: the two ranks take part. ``backward`` of the result sends the gradients to
    the other rank, if that rank has use for them; then it continues to ``delegate_variable``.
    Received variables without a gradient of their own count as having one of zeros there. Call
    several ``backward`` in the reverse order of the sends, as for :func:`send`. The
    gradient itself can be differentiated (``enable_double_backprop=True`` on both ranks); the
    gradient of ``delegate_variable`` is then where this rank's second backward starts. Without
    one, a second backward through these gradients raises RankMismatchError on the other
    rank.

    Args:
        communicator: the communicator to which both ranks belong.
        rank: where from.
        delegate_variable: what backward of the result is to visit afterwards: the result of
            an earlier :func:`send` of this process, or any other variable.
        tag: the sender's.
        force_tuple: return a tuple even if it holds one variable.

    Returns:
        A variable, or a tuple of them if several were sent; fresh arrays with the shapes and
        dtypes of those sent. Variables that need no gradient at the sender need none here
        either, unless there is a ``delegate_variable`` to be reached through them.

    Raises:
        TypeError: an argument is of the wrong type, or the other rank sent something else with
            this tag (which is then discarded).
        ValueError: there is no such other rank or tag.
        RankMismatchError: this rank is in ``chainer.no_backprop_mode()``, and the other one, which
            is not, would wait for gradients.
    """
    outputs, _ = recv_variables(communicator, rank, delegate_variable, tag)
    return outputs[0] if len(outputs) == 1 and not force_tuple else outputs


def recv_variables(
    communicator: CommunicatorBase,
    rank: int,
    delegate_variable: Variable | None = None,
    tag: int = 0,
    not_twice_differentiable: bool = False,
) -> tuple[tuple[Variable, ...], RecvFunction | None]:
    """Return what :func:`recv` does as a tuple, and the function that sends the gradients.

    That is None where there are none to send, and no delegate to continue to. If the delegate
    variable is ``not_twice_differentiable``, because it leads to no variable of this rank's own, it
    is as good as none for a second backward.
    """
    rank, tag = check_peer(communicator, rank, tag)
    if delegate_variable is not None and not isinstance(delegate_variable, Variable):
        raise TypeError(
            f"rank {communicator.rank}: delegate_variable must be a chainer.Variable, "
            f"got {type(delegate_variable).__name__}"
        )
    send_pending_cancellations(communicator)
    prebuilt = _prebuild(communicator, rank, tag, delegate_variable)  # while the message travels
    message = receive_message(communicator, rank, tag)
    message_id, header, _ = message
    if (
        1 in header.requires_grad_mask
        and prebuilt is None
        and not chainer_config("enable_backprop")
    ):
        here = communicator.rank
        send_cancellation(communicator, rank, message_id, NO_BACKPROP)
        raise RankMismatchError(
            f"rank {here}: recv(rank={rank}, tag={tag}) runs in no_backprop_mode, but rank {rank} "
            f"called send(rank={here}, tag={tag}) outside of it and would wait for gradients; use "
            "the mode on both ranks, or send what needs no gradient (the variable's array)"
        )
    variables, node = make_outputs(message, communicator, rank, tag, delegate_variable, prebuilt)
    if node is not None:
        node.expect_backward(not_twice_differentiable)
    return variables, node


class Prebuilt(NamedTuple):
    """What is built of a receive before its message has come, as if it brought one array."""

    node: RecvFunction
    inputs: tuple[Variable, ...]
    output: Variable


def _prebuild(
    communicator: CommunicatorBase, peer: int, tag: int, delegate: Variable | None
) -> Prebuilt | None:
    """Build the function and its output; None where that has to wait for the message."""
    if not chainer_config("enable_backprop"):
        return None
    leaf = make_variable(EMPTY, True)
    inputs = (leaf,) if delegate is None else (delegate, leaf)
    node = RecvFunction(communicator, peer, tag, delegate is not None)
    if not node.begin_apply(inputs):
        return None
    return Prebuilt(node, inputs, *node.build_outputs(inputs, (None,)))


def make_outputs(
    message: Message,
    communicator: CommunicatorBase,
    peer: int,
    tag: int,
    delegate: Variable | None,
    prebuilt: Prebuilt | None = None,
) -> tuple[tuple[Variable, ...], RecvFunction | None]:
    """Return the message's arrays as variables, and the function that sends their gradients.

    That function, which continues to the delegate, is None if backward has nothing to do.
    """
    _, header, arrays = message
    mask = header.requires_grad_mask
    is_needed = 1 in mask or (delegate is not None and delegate.requires_grad)
    if not is_needed or (prebuilt is None and not chainer_config("enable_backprop")):
        return tuple([make_variable(array, False) for array in arrays]), None
    outputs: tuple[Variable, ...]
    if prebuilt is not None and len(arrays) == 1 and type(arrays[0]) is np.ndarray:
        node, _, output = prebuilt
        output.array = arrays[0]
        outputs = (output,)
    elif prebuilt is not None and all([type(array) is np.ndarray for array in arrays]):
        node, inputs, _ = prebuilt
        outputs = node.build_outputs(inputs, arrays)
    else:
        inputs = ()
        if delegate is not None:
            inputs = (delegate_on_device_of((*arrays, None)[0], delegate),)
        if 1 in mask:  # without an input that requires a gradient backward would not come here
            inputs += (Variable(empty_on_device_of(arrays[0])),)
        node = RecvFunction(communicator, peer, tag, delegate is not None)
        node.arrays = arrays
        outputs = node.apply(inputs)
    node.bind(message)
    if 0 in mask and delegate is None:
        outputs = tuple(
            [
                output if requires_grad else make_variable(array, False)
                for output, array, requires_grad in zip(outputs, arrays, mask, strict=True)
            ]
        )
    return outputs, node


class RecvFunction(OrderedFunctionNode):
    """The function of a receive.

    Inputs: the delegate, if there is one, and, if any gradient is wanted, a leaf that requires
    one. Outputs: the message's arrays.
    """

    _backward_expected = False  # as for SendFunction
    arrays: tuple[Any, ...] = ()  # what `forward` is to return

    def __init__(
        self, communicator: CommunicatorBase, peer: int, tag: int, has_delegate: bool
    ) -> None:
        self._label = f"{SCOPE}backward of recv(rank={peer}, tag={tag})"
        self._communicator = communicator
        self._peer = peer
        self._tag = tag
        self._has_delegate = has_delegate
        self._not_twice_differentiable = not has_delegate

    def bind(self, message: Message) -> None:
        """Remember what backward needs of the message that was received."""
        message_id, header, _ = message
        self._message_id = message_id if header.reply_id == NO_REPLY else header.reply_id
        self._requires_grad_mask = header.requires_grad_mask
        self._is_last_derivative = header.not_twice_differentiable

    def expect_backward(self, not_twice_differentiable: bool) -> None:
        """Warn if this is dropped before backward came here.

        Args:
            not_twice_differentiable: whether the delegate leads to no variable of this rank's own.
        """
        self._backward_expected = 1 in self._requires_grad_mask
        self._not_twice_differentiable |= not_twice_differentiable

    def __del__(self) -> None:
        if self._backward_expected:
            warn_dropped_recv(self._communicator, self._peer, self._tag, self._message_id)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        arrays, self.arrays = self.arrays, ()  # whose memory isn't ours to hold
        self.empty_array = empty_on_device_of((*arrays, *inputs)[0])
        return arrays

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        self._backward_expected = False
        sent: Variable | None = None
        gradients: tuple[Variable, ...] = ()
        positions: tuple[int, ...] = ()
        mask = self._requires_grad_mask
        if 1 in mask:
            gradients = grad_outputs[: len(mask)]
            if 0 in mask or gradients[0] is None or len(mask) > 1:
                given = {i: g for i, g in enumerate(gradients) if mask[i] and g is not None}
                gradients = tuple(given.values())
                positions = () if len(given) == len(mask) else tuple(given)
            if self._is_last_derivative:
                if gradients:
                    raise self._last_derivative_error()
            else:
                differentiable = bool(chainer_config("enable_backprop"))
                if gradients and differentiable:
                    gradients = connect_all(self.control_output(), gradients)
                last = self._not_twice_differentiable or 0 not in indexes
                sent = self._send_gradients(gradients, positions, differentiable, last)
        if not self._has_delegate:
            return (None,) * len(indexes)
        used = positions or range(len(gradients))
        others = tuple(g for position, g in enumerate(grad_outputs) if position not in used)
        (zeros,) = keep_control_dependencies((sent, *others), (zeros_for_input(self, 0, self._xp),))
        return tuple(None if index else zeros for index in indexes)

    def _send_gradients(
        self,
        gradients: tuple[Variable, ...],
        positions: tuple[int, ...],
        differentiable: bool,
        not_twice_differentiable: bool,
    ) -> Variable | None:
        """Send gradients; see :class:`Header` for the arguments.

        Returns a delegate variable where the gradients can be differentiated again, else None.
        """
        mask, last, reply_id = bytes(len(gradients)), False, NO_REPLY
        if differentiable:
            mask, last = requires_grad_mask(gradients), not_twice_differentiable
            reply_id = next(message_ids)
        header = make_header(mask, positions, differentiable, 0, last, reply_id)
        arrays = tuple([gradient.array for gradient in gradients])
        to = self._communicator, self._peer, self._communicator.reserved_tag
        send_message(header, arrays, *to, self._message_id, self._label)
        return SendFunction(reply_id, *to, mask).apply(gradients)[0] if differentiable else None

    def _last_derivative_error(self) -> RankMismatchError:
        rank, peer = self._communicator.rank, self._peer
        return RankMismatchError(
            f"rank {rank}: gradients that came from rank {peer} can't be differentiated "
            f"again: rank {peer} received what they belong to without a delegate_variable "
            "that requires a gradient, as the first component of a MultiNodeChainList does, so "
            "that a second backward has nothing there to start from. Give recv one, and go on "
            "from its gradient"
        )

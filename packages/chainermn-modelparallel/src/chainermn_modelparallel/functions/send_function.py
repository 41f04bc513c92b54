"""`send`: one end of an edge of the computational graph from this rank to another.

Backward of a send receives the gradients. If these can be differentiated, they are received as
`recv` does it, whose backward is a send again; so this module and `recv_function` need each other.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any
from weakref import ref

import chainer
import numpy as np
from chainer import Variable

from chainermn_comm import CommunicatorBase, RankMismatchError

from .cancellation import (
    REASONS,
    is_failed_send,
    send_pending_cancellations,
    unknown_gradient_error,
    warn_dropped_send,
)
from .control_dependencies import keep_control_dependencies, zeros_for_input
from .messages import Header, Message, check_peer, make_header, receive_message, send_message
from .ordered_function import (
    SCOPE,
    OrderedFunctionNode,
    chainer_config,
    empty_on_device_of,
    make_variable,
    requires_grad_mask,
)

# Messages of this process are numbered. The sends whose gradients may still come, by message id.
message_ids = itertools.count()
_pending_sends: dict[int, ref[SendFunction]] = {}


def send(x: Any, communicator: CommunicatorBase, rank: int, tag: int = 0) -> Variable:
    """Send variables to another rank, which calls :func:`recv`.

    Not collective: the two ranks take part. ``backward`` of the result waits for the gradients
    from the other rank and continues with them; so the other rank has to run backward too. No
    gradients are waited for, nor sent there, for variables that need none here: arrays,
    integers, ``requires_grad=False``, and all of them under ``chainer.no_backprop_mode()``.
    One ``backward`` comes to what was sent, received and communicated collectively in the reverse
    of the order in which that was done. Call several of them in the reverse order of the sends, on
    both ranks: gradients find their send in any order, but large ones keep the rank that sends
    them until the other receives, so that two ranks could wait for each other.

    Data do too: a large ``x`` keeps this rank until the other one receives it. Of two ranks that
    exchange, let one receive first; if both send first, they wait for each other, which is
    reported at ``CHAINERMN_TIMEOUT`` (use :func:`~chainermn.functions.alltoall` for exchanges
    among all ranks).

    Args:
        x: a variable or an array, or a tuple or list of them; any shapes, memory orders and
            dtypes, which may differ. Nothing is converted on the way.
        communicator: the communicator to which both ranks belong.
        rank: where to.
        tag: tells apart messages between the same two ranks; from 0 on.

    Returns:
        A delegate variable: it holds no data (float32 of shape ``(0,)``), only the way back.
        Keep it: make it the ``delegate_variable`` of the next :func:`recv` or of
        :func:`pseudo_connect`, or call its ``backward``. If it is dropped before, and gradients
        would have come, there is a ``RuntimeWarning``.

    Raises:
        TypeError: an argument is of the wrong type, arrays of CPU and GPU are mixed, or an array
            holds Python objects.
        ValueError: there is no such other rank or tag, ``x`` is empty, or a parameter in it is
            not initialised. Nothing has been sent then, and the other rank still waits.
        RankMismatchError: by ``backward`` of the result, when the other rank ran its ``recv`` in
            ``chainer.no_backprop_mode()``, or dropped what that returned.
    """
    rank, tag = check_peer(communicator, rank, tag)
    variables, arrays = _check_variables(x, communicator.rank)
    send_pending_cancellations(communicator)
    message_id, mask = next(message_ids), requires_grad_mask(variables)
    send_message(make_header(mask), arrays, communicator, rank, tag, message_id)
    # The graph is built while the other rank works on the message.
    node = SendFunction(message_id, communicator, rank, tag, mask)
    (delegate,) = node.apply(variables)
    node.expect_backward()
    return delegate


class SendFunction(OrderedFunctionNode):
    """The function of a send: its inputs are sent, its output is an empty delegate."""

    # Whether backward has to come here, so that it is an error to drop this before.
    _backward_expected = False

    def __init__(
        self, message_id: int, communicator: CommunicatorBase, peer: int, tag: int, mask: bytes
    ) -> None:
        self._message_id = message_id
        self._communicator = communicator
        self._peer = peer
        self._tag = tag
        self._requires_grad_mask = mask
        self._received: deque[Message] = deque()
        self._label = f"{SCOPE}backward of send(rank={peer}, tag={tag})"
        _pending_sends[message_id] = ref(self)

    def expect_backward(self) -> None:
        """Warn if this is dropped before backward came here."""
        self._backward_expected = 1 in self._requires_grad_mask

    def __del__(self, forget: Any = _pending_sends.pop) -> None:  # a global may be gone at exit
        forget(self._message_id, None)
        if self._backward_expected:
            warn_dropped_send(self._message_id, self._communicator.rank, self._peer, self._tag)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if inputs:
            self.empty_array = empty_on_device_of(inputs[0])
        return (self.empty_array,)

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        self._backward_expected = False
        differentiable = bool(chainer_config("enable_backprop"))
        results: tuple[Variable, ...] = ()
        positions: Sequence[int] = ()
        if 1 in self._requires_grad_mask:
            first = make_variable(None, False)  # made while the message is on its way
            message = self._receive_gradients()
            _, header, arrays = message
            if header.differentiable != differentiable or header.cancellation:
                raise self._no_gradients_error(header, differentiable)
            if 1 in header.requires_grad_mask:
                from .recv_function import make_outputs

                # A second backward through the gradients asks for this edge's gradients again.
                results, _ = make_outputs(
                    message,
                    self._communicator,
                    self._peer,
                    self._communicator.reserved_tag,
                    self.control_output(),
                )
            elif arrays:
                first.array = arrays[0]
                results = (first, *[make_variable(array, False) for array in arrays[1:]])
            positions = header.positions
        if positions or len(results) != len(indexes):
            by_index = dict(zip(positions or range(len(results)), results, strict=True))
            # Zeros and not None elsewhere, so that backward reaches what lies before this edge:
            # other ranks may wait for it.
            results = tuple(
                [
                    by_index[index] if index in by_index else zeros_for_input(self, index, self._xp)
                    for index in indexes
                ]
            )
        return keep_control_dependencies(grad_outputs, results) if differentiable else results

    def _receive_gradients(self) -> Message:
        """Wait for the gradients of this send; those of others that come first are kept for them.

        Raises:
            RuntimeError: gradients came for a send that is gone.
        """
        send_pending_cancellations(self._communicator)
        if self._received:
            return self._received.popleft()
        tag = self._communicator.reserved_tag
        while True:
            message = receive_message(self._communicator, self._peer, tag, self._label)
            message_id, header, _ = message
            if message_id == self._message_id:
                return message
            reference = _pending_sends.get(message_id)
            owner = reference() if reference else None
            if owner is not None:
                owner._received.append(message)
            elif not header.cancellation and not is_failed_send(message_id):
                rank = self._communicator.rank
                raise unknown_gradient_error(self._message_id, message_id, rank, self._peer)

    def _no_gradients_error(self, header: Header, differentiable: bool) -> RankMismatchError:
        """Return the error of a cancellation, or of gradients with a graph on one rank alone."""
        rank, peer = self._communicator.rank, self._peer
        call = f"rank {rank}: backward of send(rank={peer}, tag={self._tag})"
        if header.cancellation:
            return RankMismatchError(
                f"{call} gets no gradients: rank {peer} {REASONS[header.cancellation]}"
            )
        with_graph, without = (rank, peer) if differentiable else (peer, rank)
        return RankMismatchError(
            f"{call}: rank {with_graph} runs "
            f"it with enable_double_backprop=True and rank {without} without, so a second "
            "derivative would lack a part; use it on both ranks"
        )


def _check_variables(x: Any, rank: int) -> tuple[tuple[Variable, ...], tuple[Any, ...]]:
    """Return what the user wants to send as variables, and their arrays."""
    if type(x) is Variable and type(array := x.raw_array) is np.ndarray and x.layout is None:
        return (x,), (array,)  # nearly always
    items = tuple(x) if isinstance(x, (tuple, list)) else (x,)
    if not items:
        raise ValueError(f"rank {rank}: there is nothing to send: x is empty")
    for item in items:
        if not isinstance(item, (Variable, *chainer.get_array_types())):
            raise TypeError(
                f"rank {rank}: x must be a variable, an array, or a tuple or list of them, "
                f"got {type(item).__name__}"
            )
        if isinstance(item, Variable) and item.array is None:
            raise ValueError(f"rank {rank}: {item.name or 'a parameter'} is not initialised yet")
    variables = tuple(map(chainer.as_variable, items))
    arrays = tuple([variable.array for variable in variables])
    if len(arrays) > 1 and not chainer.is_arrays_compatible(arrays):
        raise TypeError(f"rank {rank}: x mixes arrays of CPU and GPU; move them to one device")
    return variables, arrays

"""The functions at the two ends of an edge of the computational graph from one rank to another.

Backward of a receive sends gradients, and backward of a send receives them. Gradients
that can be differentiated go by a new edge, in the other direction.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import ref

import numpy as np
from chainer import Variable

from chainermn_comm import RankMismatchError

from .cancellation import (
    REASONS,
    failed_sends,
    send_pending_cancellations,
    unknown_gradient_error,
    warn_dropped_recv,
    warn_dropped_send,
)
from .control_dependencies import (
    connect_all,
    delegate_on_device_of,
    keep_control_dependencies,
    zeros_for_input,
)
from .messages import (
    NO_REPLY,
    Edge,
    Header,
    Message,
    encode_header,
    message_ids,
    receive_message,
    send_message,
)
from .ordered_function import (
    EMPTY,
    SCOPE,
    Arrays,
    Gradients,
    OrderedFunctionNode,
    Variables,
    chainer_config,
    empty_on_device_of,
    make_variable,
    requires_grad_mask,
)

BACKWARD = SCOPE + "backward of "
# The sends whose gradients may still come, by message id.
_pending_sends: dict[int, ref[SendFunction]] = {}


class EdgeFunction(OrderedFunctionNode):
    """A function at one end of an edge."""

    _function: str  # what the user called
    # Whether backward has to come here, so that it is an error to drop this before.
    backward_expected = False

    def __init__(self, edge: Edge) -> None:
        self._communicator, self._peer, self._tag = edge

    @property
    def _call(self) -> str:
        return f"{self._function}(rank={self._peer}, tag={self._tag})"

    @property
    def _gradient_edge(self) -> Edge:
        return self._communicator, self._peer, self._communicator.reserved_tag


class SendFunction(EdgeFunction):
    """The function of a send: its inputs are sent, its output is an empty delegate."""

    _function = "send"

    def __init__(self, edge: Edge, message_id: int, mask: bytes) -> None:
        super().__init__(edge)
        self._message_id = message_id
        self._requires_grad_mask = mask
        self._received: deque[Message] = deque()
        _pending_sends[message_id] = ref(self)

    # A global may be gone at exit.
    def __del__(self, discard: Any = _pending_sends.pop) -> None:
        discard(self._message_id, None)
        if self.backward_expected:
            warn_dropped_send(self._message_id, self._communicator.rank, self._call)

    def forward(self, inputs: Arrays) -> Arrays:
        if inputs:
            self.empty_array = empty_on_device_of(inputs[0])
        return (self.empty_array,)

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        self.backward_expected = False
        differentiable = bool(chainer_config("enable_backprop"))
        results: Variables = ()
        positions: tuple[int, ...] = ()
        if 1 in self._requires_grad_mask:
            message = self._receive_gradients()
            header = message[1]
            if header.differentiable != differentiable or header.cancellation:
                raise self._no_gradients_error(header, differentiable)
            # A second backward through the gradients asks for this edge's gradients
            # again.
            delegate = self.control_output() if 1 in header.requires_grad_mask else None
            results, _ = make_outputs(message, self._gradient_edge, delegate)
            positions = header.positions
        if positions or len(results) != len(indexes):
            given = dict(zip(positions or range(len(results)), results, strict=True))
            # Zeros and not None elsewhere, so that backward reaches what lies before
            # this edge: other ranks may wait for it.
            results = tuple(
                [given[i] if i in given else zeros_for_input(self, i) for i in indexes]
            )
        return (
            keep_control_dependencies(grad_outputs, results)
            if differentiable
            else results
        )

    def _receive_gradients(self) -> Message:
        """Wait for this send's gradients; keep those that come first for other sends."""
        send_pending_cancellations(self._communicator)
        if self._received:
            return self._received.popleft()
        while True:
            message = receive_message(self._gradient_edge, BACKWARD + self._call)
            message_id, header, _ = message
            if message_id == self._message_id:
                return message
            reference = _pending_sends.get(message_id)
            owner = reference() if reference else None
            if owner is not None:
                owner._received.append(message)
            elif not header.cancellation and message_id not in failed_sends:
                rank = self._communicator.rank
                raise unknown_gradient_error(
                    self._message_id, message_id, rank, self._peer
                )

    def _no_gradients_error(
        self, header: Header, differentiable: bool
    ) -> RankMismatchError:
        """Return the error of a cancellation, or of gradients with a graph on one rank alone."""
        rank, peer = self._communicator.rank, self._peer
        call = f"rank {rank}: backward of {self._call}"
        if header.cancellation:
            return RankMismatchError(
                f"{call} gets no gradients: rank {peer} {REASONS[header.cancellation]}"
            )
        with_graph, without = (rank, peer) if differentiable else (peer, rank)
        return RankMismatchError(
            f"{call}: rank {with_graph} runs it with enable_double_backprop=True and rank {without}"
            " without, so a second derivative would lack a part; use it on both ranks"
        )


class RecvFunction(EdgeFunction):
    """The function of a receive.

    Inputs: the delegate, if there is one, and a leaf that requires a gradient, without
    which backward might not come here. Outputs: the message's arrays.
    """

    _function = "recv"
    arrays: Arrays = ()  # what `forward` is to return
    # Whether a second backward can't start here: the delegate leads to no variable of
    # this rank.
    not_twice_differentiable = False

    def bind(self, message: Message) -> None:
        """Remember what backward needs of the message that was received."""
        message_id, self._header, _ = message
        reply_id = self._header.reply_id
        self._message_id = message_id if reply_id == NO_REPLY else reply_id

    def __del__(self) -> None:
        if self.backward_expected:
            warn_dropped_recv(
                self._communicator, self._peer, self._call, self._message_id
            )

    def forward(self, inputs: Arrays) -> Arrays:
        arrays, self.arrays = self.arrays, ()  # whose memory isn't ours to hold
        self.empty_array = empty_on_device_of(arrays[0])
        return arrays

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        self.backward_expected = False
        mask = self._header.requires_grad_mask
        given = [
            i for i, needed in enumerate(mask) if needed and grad_outputs[i] is not None
        ]
        sent: Variable | None = None
        if not self._header.not_twice_differentiable and 1 in mask:
            last = self.not_twice_differentiable or 0 not in indexes
            sent = self._send_gradients(
                given, tuple([grad_outputs[i] for i in given]), last
            )
        elif given:
            rank, peer = self._communicator.rank, self._peer
            raise RankMismatchError(
                f"rank {rank}: gradients that came from rank {peer} can't be differentiated "
                f"again: rank {peer} received what they belong to without a delegate_variable "
                "that requires a gradient, as the first component of a MultiNodeChainList does, so "
                "that a second backward has nothing there to start from. Give recv one, and go on "
                "from its gradient"
            )
        if len(self.inputs) == 1:
            return (None,) * len(indexes)
        others = [gradient for i, gradient in enumerate(grad_outputs) if i not in given]
        (zeros,) = keep_control_dependencies(
            (sent, *others), (zeros_for_input(self, 0),)
        )
        return tuple(None if index else zeros for index in indexes)

    def _send_gradients(
        self, given: list[int], gradients: Arrays, not_twice_differentiable: bool
    ) -> Variable | None:
        """Send the gradients of the outputs ``given``; see :class:`Header`.

        Returns a delegate variable where they can be differentiated again, else None.
        """
        positions = (
            () if len(given) == len(self._header.requires_grad_mask) else tuple(given)
        )
        mask, last, reply_id = bytes(len(given)), False, NO_REPLY
        differentiable = bool(chainer_config("enable_backprop"))
        if differentiable:
            if gradients:
                gradients = connect_all(self.control_output(), gradients)
            mask, last = requires_grad_mask(gradients), not_twice_differentiable
            reply_id = next(message_ids)
        metadata = encode_header(mask, positions, differentiable, 0, last, reply_id)
        arrays = tuple([gradient.array for gradient in gradients])
        label = BACKWARD + self._call
        send_message(metadata, arrays, self._gradient_edge, self._message_id, label)
        if not differentiable:
            return None
        return SendFunction(self._gradient_edge, reply_id, mask).apply(gradients)[0]


def prebuild_output(edge: Edge, delegate: Variable | None) -> Variable | None:
    """Build the function of a receive, and its output, while the message travels.

    As if the message brought one array, which is missing; None where Chainer has to
    build them.
    """
    if not chainer_config("enable_backprop"):
        return None
    leaf = make_variable(EMPTY, True)
    inputs = (leaf,) if delegate is None else (delegate, leaf)
    node = RecvFunction(edge)
    return node.build_outputs(inputs, (None,))[0] if node.begin_apply(inputs) else None


def make_outputs(
    message: Message,
    edge: Edge,
    delegate: Variable | None,
    prebuilt: Variable | None = None,
) -> tuple[Variables, RecvFunction | None]:
    """Return the message's arrays as variables, and the function that sends their gradients.

    That function, which continues to the delegate, is None if backward has nothing to
    do.
    """
    _, header, arrays = message
    mask = header.requires_grad_mask
    is_needed = 1 in mask or (delegate is not None and delegate.requires_grad)
    if not is_needed or (prebuilt is None and not chainer_config("enable_backprop")):
        return tuple([make_variable(array, False) for array in arrays]), None
    outputs: Variables
    node: RecvFunction
    if prebuilt is None or not all([type(array) is np.ndarray for array in arrays]):
        inputs: Variables = (Variable(empty_on_device_of(arrays[0])),)
        if delegate is not None:
            inputs = (delegate_on_device_of(arrays[0], delegate), *inputs)
        node = RecvFunction(edge)
        node.arrays = arrays
        outputs = node.apply(inputs)
    else:
        node = prebuilt.creator_node
        prebuilt.array = arrays[0]
        outputs = (prebuilt,) if len(arrays) == 1 else node.build_outputs((), arrays)
    node.bind(message)
    if 0 in mask and delegate is None:
        outputs = tuple(
            output if requires_grad else make_variable(array, False)
            for output, array, requires_grad in zip(outputs, arrays, mask, strict=True)
        )
    return outputs, node

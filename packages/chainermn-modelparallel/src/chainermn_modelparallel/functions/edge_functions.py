"""The functions at the two ends of an edge of the computational graph from one rank to another.

Backward of a receive sends gradients, and backward of a send receives them. Gradients
that can be differentiated go by a new edge, in the other direction.
"""

from __future__ import annotations

from collections import deque
from weakref import WeakValueDictionary

import chainer
from chainer import Variable

from chainermn_comm import RankMismatchError

from .cancellation import (
    REASONS,
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
    Edge,
    Header,
    Message,
    message_ids,
    receive_message,
    send_message,
)
from .ordered_function import (
    SCOPE,
    Arrays,
    Gradients,
    OrderedFunctionNode,
    Variables,
    empty_on_device_of,
    requires_grad_mask,
)

BACKWARD = SCOPE + "backward of "
# The sends whose gradients may still come, by message id.
_pending_sends: WeakValueDictionary[int, SendFunction] = WeakValueDictionary()


class EdgeFunction(OrderedFunctionNode):
    """A function at one end of an edge."""

    _function: str  # what the user called
    # Whether backward has to come here, so that it is an error to drop this before.
    backward_expected = False

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    @property
    def _call(self) -> str:
        return f"{self._function}(rank={self._edge.peer}, tag={self._edge.tag})"

    @property
    def _gradient_edge(self) -> Edge:
        return self._edge._replace(tag=self._edge.communicator.reserved_tag)


class SendFunction(EdgeFunction):
    """The function of a send: its inputs are sent, its output is an empty delegate."""

    _function = "send"

    def __init__(self, edge: Edge, message_id: int, mask: bytes) -> None:
        super().__init__(edge)
        self._message_id = message_id
        self._requires_grad_mask = mask
        self._received: deque[Message] = deque()
        _pending_sends[message_id] = self

    def __del__(self) -> None:
        if self.backward_expected:
            warn_dropped_send(self._edge.communicator.rank, self._call)

    def forward(self, inputs: Arrays) -> Arrays:
        return self.with_control_output((), like=inputs[0])

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        self.backward_expected = False
        gradients: dict[int, Variable] = {}
        if 1 in self._requires_grad_mask:
            message = self._receive_gradients()
            header = message.header
            differentiable = chainer.config.enable_backprop
            if header.differentiable != differentiable or header.cancellation:
                raise self._no_gradients_error(header)
            # A second backward through the gradients asks for this edge's gradients
            # again.
            delegate = None
            if 1 in header.requires_grad_mask:
                delegate = self.control_output()
            received, _ = make_outputs(message, self._gradient_edge, delegate)
            needed = [i for i, bit in enumerate(self._requires_grad_mask) if bit]
            gradients = dict(zip(needed, received, strict=True))
        # Zeros and not None elsewhere, so that backward reaches what lies before this
        # edge: other ranks may wait for it.
        results = tuple(
            gradients[i] if i in gradients else zeros_for_input(self, i)
            for i in indexes
        )
        return keep_control_dependencies(grad_outputs, results)

    def _receive_gradients(self) -> Message:
        """Wait for this send's gradients; keep those that come first for other sends."""
        communicator, peer, _ = self._edge
        send_pending_cancellations(communicator)
        while not self._received:
            message = receive_message(self._gradient_edge, BACKWARD + self._call)
            owner = _pending_sends.get(message.header.message_id)
            if owner is not None:
                owner._received.append(message)
            elif not message.header.cancellation:
                raise unknown_gradient_error(communicator.rank, peer)
        return self._received.popleft()

    def _no_gradients_error(self, header: Header) -> RankMismatchError:
        """Return the error of a cancellation, or of gradients with a graph on one rank alone."""
        rank = self._edge.communicator.rank
        peer = self._edge.peer
        call = f"rank {rank}: backward of {self._call}"
        if header.cancellation:
            return RankMismatchError(
                f"{call} gets no gradients: rank {peer} {REASONS[header.cancellation]}"
            )
        with_graph, without = (peer, rank) if header.differentiable else (rank, peer)
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
    # Whether a second backward can't start here: the delegate leads to no variable of
    # this rank.
    not_twice_differentiable = False

    def __init__(self, edge: Edge, message: Message) -> None:
        super().__init__(edge)
        self._header = message.header
        self._arrays = message.arrays
        # Of each output: shape and dtype.
        self._specs = [(array.shape, array.dtype) for array in message.arrays]

    @property
    def _message_id(self) -> int:
        """The id by which the message is answered."""
        header = self._header
        return header.reply_id if header.differentiable else header.message_id

    def __del__(self) -> None:
        if self.backward_expected:
            communicator, peer, _ = self._edge
            warn_dropped_recv(communicator, peer, self._call, self._message_id)

    def forward(self, inputs: Arrays) -> Arrays:
        arrays = self._arrays
        self._arrays = ()  # whose memory isn't ours to hold
        return self.with_control_output(arrays, like=arrays[0])

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        self.backward_expected = False
        needed = [i for i, bit in enumerate(self._header.requires_grad_mask) if bit]
        sent: Variable | None = None
        if needed and not self._header.not_twice_differentiable:
            gradients = tuple(self._gradient(i, grad_outputs[i]) for i in needed)
            is_last = self.not_twice_differentiable or 0 not in indexes
            sent = self._send_gradients(gradients, is_last)
        elif any(grad_outputs[i] is not None for i in needed):
            rank = self._edge.communicator.rank
            peer = self._edge.peer
            raise RankMismatchError(
                f"rank {rank}: gradients that came from rank {peer} can't be differentiated "
                f"again: rank {peer} received what they belong to without a delegate_variable "
                "that requires a gradient, as the first component of a MultiNodeChainList does, so "
                "that a second backward has nothing there to start from. Give recv one, and go on "
                "from its gradient"
            )
        if len(self.inputs) == 1:
            return (None,) * len(indexes)
        unsent = [x for i, x in enumerate(grad_outputs) if i not in needed]
        zeros = keep_control_dependencies((sent, *unsent), (zeros_for_input(self, 0),))
        return tuple(None if index else zeros[0] for index in indexes)

    def _gradient(self, index: int, gradient: Variable | None) -> Variable:
        if gradient is not None:
            return gradient
        shape, dtype = self._specs[index]
        return Variable(self.xp.zeros(shape, dtype), requires_grad=False)

    def _send_gradients(
        self, gradients: Variables, not_twice_differentiable: bool
    ) -> Variable | None:
        """Send the gradients of the outputs that need one; see :class:`Header`.

        Returns a delegate variable where they can be differentiated again, else None.
        """
        label = BACKWARD + self._call
        arrays = tuple(gradient.array for gradient in gradients)
        if not chainer.config.enable_backprop:
            header = Header(self._message_id, bytes(len(gradients)))
            send_message(header, arrays, self._gradient_edge, label)
            return None
        gradients = connect_all(self.control_output(), gradients)
        header = Header(
            self._message_id,
            requires_grad_mask(gradients),
            reply_id=next(message_ids),
            not_twice_differentiable=not_twice_differentiable,
        )
        send_message(header, arrays, self._gradient_edge, label)
        node = SendFunction(
            self._gradient_edge, header.reply_id, header.requires_grad_mask
        )
        (delegate,) = node.apply(gradients)
        return delegate


def make_outputs(
    message: Message, edge: Edge, delegate: Variable | None
) -> tuple[Variables, RecvFunction | None]:
    """Return the message's arrays as variables, and the function that sends their gradients.

    That function, which continues to the delegate, is None if backward has nothing to
    do.
    """
    mask = message.header.requires_grad_mask
    constants = tuple(Variable(array, requires_grad=False) for array in message.arrays)
    is_needed = 1 in mask or (delegate is not None and delegate.requires_grad)
    if not is_needed or not chainer.config.enable_backprop:
        return constants, None
    node = RecvFunction(edge, message)
    inputs: Arrays = (Variable(empty_on_device_of(message.arrays[0])),)
    if delegate is not None:
        inputs = (delegate_on_device_of(message.arrays[0], delegate), *inputs)
    outputs = node.apply(inputs)[:-1]
    if delegate is not None:
        return outputs, node
    pairs = zip(mask, outputs, constants, strict=True)
    return tuple(output if bit else constant for bit, output, constant in pairs), node

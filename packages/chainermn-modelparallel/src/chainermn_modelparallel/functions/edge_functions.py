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
    cancel_later,
    send_pending_cancellations,
    warn_dropped,
)
from .control_dependencies import (
    Arrays,
    Gradients,
    Variables,
    delegate_on_device_of,
    empty_on_device_of,
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
from .ordered_function import SCOPE, OrderedFunctionNode, requires_grad_mask

BACKWARD = SCOPE + "backward of "
# The sends whose gradients may still come, by the id of the message that was sent.
_pending_sends: WeakValueDictionary[int, SendFunction] = WeakValueDictionary()


class EdgeFunction(OrderedFunctionNode):
    """A function at one end of an edge."""

    _function: str  # the function that the user called
    # Whether backward has to come here. A function that is dropped before is reported.
    backward_expected = False

    def __init__(self, edge: Edge, header: Header) -> None:
        self._edge = edge
        self._gradient_edge = edge._replace(tag=edge.communicator.reserved_tag)
        self._header = header  # of the sent or received message

    @property
    def _call(self) -> str:
        return f"{self._function}(rank={self._edge.peer}, tag={self._edge.tag})"


class SendFunction(EdgeFunction):
    """The function of a send: its inputs are sent, its output is an empty delegate."""

    _function = "send"

    def __init__(self, edge: Edge, header: Header, reported_as: str) -> None:
        super().__init__(edge, header)
        self._reported_as = reported_as  # its name in the watchdog's reports
        self._received: deque[Message] = deque()
        _pending_sends[header.message_id] = self

    def __del__(self) -> None:
        if self.backward_expected:
            warn_dropped(
                f"rank {self._edge.communicator.rank}: the delegate variable that {self._call}",
                "what was sent gets no gradient. Keep it with pseudo_connect or as "
                "delegate_variable of the next recv, or call its backward",
            )

    def forward(self, inputs: Arrays) -> Arrays:
        send_message(self._header, inputs, self._edge, self._reported_as)
        # The graph is built while the other rank works on the message.
        return self.with_delegate_output((), like=inputs[0])

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        self.backward_expected = False
        gradients = {}
        needed = self._header.needed
        if needed:
            message = self._receive_gradients()
            # A second backward through the gradients asks for this edge's gradients
            # again.
            delegate = None
            if message.header.needed:
                delegate = self.delegate_output()
            received, _ = make_outputs(message, self._gradient_edge, delegate)
            gradients = dict(zip(needed, received, strict=True))
        for index in indexes:
            # The other inputs get zeros and not None. So backward reaches the functions
            # before this edge, where other ranks may wait for it.
            if index not in gradients:
                gradients[index] = zeros_for_input(self, index)
        results = tuple(gradients[index] for index in indexes)
        return keep_control_dependencies(grad_outputs, results)

    def _receive_gradients(self) -> Message:
        """Wait for this send's gradients; give gradients of other sends to their functions.

        Raises:
            RankMismatchError: no gradients come, or only one of the two ranks builds a
                graph of them.
        """
        communicator, peer, _ = self._edge
        rank = communicator.rank
        send_pending_cancellations(communicator)
        while not self._received:
            message = receive_message(self._gradient_edge, BACKWARD + self._call)
            owner = _pending_sends.get(message.header.answered_id)
            if owner is not None:
                owner._received.append(message)
            elif not message.header.cancellation:
                raise RuntimeError(
                    f"rank {rank}: rank {peer} ran backward through a variable "
                    f"whose send on rank {rank} is gone: its delegate variable "
                    "was dropped, or backward ran more often there than here. Keep the "
                    "result of send with pseudo_connect or as delegate_variable of the next "
                    "recv, and run backward equally often on both; or send without gradients "
                    "(the variable's array)"
                )
        message = self._received.popleft()
        header = message.header
        call = f"rank {rank}: backward of {self._call}"
        if header.cancellation:
            raise RankMismatchError(
                f"{call} gets no gradients: rank {peer} {REASONS[header.cancellation]}"
            )
        if header.differentiable != chainer.config.enable_backprop:
            with_graph = rank
            if header.differentiable:
                with_graph = peer
            raise RankMismatchError(
                f"{call}: rank {with_graph} runs it with enable_double_backprop=True and the "
                "other rank without, so a second derivative would lack a part; use it on both "
                "ranks"
            )
        return message


class RecvFunction(EdgeFunction):
    """The function of a receive.

    Input: the delegate variable if it needs a gradient; otherwise a leaf that needs a
    gradient, without which backward might not come here. Outputs: the message's arrays.
    """

    _function = "recv"
    # Whether a second backward can't start here, because the delegate leads to no variable
    # of this rank.
    not_twice_differentiable = False

    def __init__(self, edge: Edge, message: Message) -> None:
        super().__init__(edge, message.header)
        self._arrays = message.arrays

    def __del__(self) -> None:
        if self.backward_expected:
            communicator, peer, _ = self._edge
            cancel_later(communicator, peer, self._header.message_id)
            warn_dropped(
                f"rank {communicator.rank}: what {self._call}",
                f"backward on rank {peer} gets no gradients. Run backward through it",
            )

    def forward(self, inputs: Arrays) -> Arrays:
        arrays = self._arrays
        self._arrays = ()  # this function must not keep the arrays' memory
        return self.with_delegate_output(arrays, like=arrays[0])

    def backward(self, indexes: tuple[int, ...], grad_outputs: Gradients) -> Gradients:
        self.backward_expected = False
        needed = self._header.needed
        sources = grad_outputs
        if needed and not self._header.not_twice_differentiable:
            gradients = self.connected_gradients(grad_outputs)
            sent = self._send_gradients(tuple(gradients[i] for i in needed))
            sources = (sent, *grad_outputs)
        elif any(grad_outputs[i] is not None for i in needed):
            communicator, peer, _ = self._edge
            raise RankMismatchError(
                f"rank {communicator.rank}: gradients that came from rank {peer} can't be "
                f"differentiated again: rank {peer} received what they belong to without a "
                "delegate_variable that requires a gradient, as the first component of a "
                "MultiNodeChainList does, so that a second backward has nothing there to start "
                "from. Give recv one, and go on from its gradient"
            )
        return keep_control_dependencies(sources, (zeros_for_input(self, 0),))

    def _send_gradients(self, gradients: Variables) -> Variable | None:
        """Send the gradients of the outputs that need one.

        Return a delegate variable if they can be differentiated again, otherwise None.
        """
        header = Header(
            next(message_ids),
            self._header.message_id,
            differentiable=chainer.config.enable_backprop,
            not_twice_differentiable=self.not_twice_differentiable,
            requires_grad_mask=requires_grad_mask(gradients),
        )
        edge = self._gradient_edge
        reported_as = BACKWARD + self._call
        if header.differentiable:
            return SendFunction(edge, header, reported_as).apply(gradients)[0]
        arrays = tuple([gradient.array for gradient in gradients])
        send_message(header, arrays, edge, reported_as)
        return None


def make_outputs(
    message: Message, edge: Edge, delegate: Variable | None
) -> tuple[Variables, RecvFunction | None]:
    """Return the message's arrays as variables, and the function that sends their gradients.

    The function, which continues to the delegate, is None if backward has nothing to
    do.
    """
    header, arrays = message
    leads_back = delegate is not None and delegate.requires_grad
    node = None
    outputs = ()
    if (leads_back or header.needed) and chainer.config.enable_backprop:
        start = Variable(empty_on_device_of(arrays[0]))
        if delegate is not None and leads_back:
            start = delegate_on_device_of(arrays[0], delegate)
        node = RecvFunction(edge, message)
        node.not_twice_differentiable = not leads_back
        outputs = node.apply((start,))
    variables: Variables = ()
    for index, array in enumerate(arrays):
        if outputs and (leads_back or header.requires_grad_mask[index]):
            variables += (outputs[index],)
        else:
            variables += (Variable(array, requires_grad=False),)
    return variables, node

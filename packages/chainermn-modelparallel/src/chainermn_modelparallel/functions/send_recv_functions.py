"""The two ends of an edge of the computational graph from one rank to another.

Backward runs it the other way: the gradients go from `Recv` to `Send`, by a `Send` and a `Recv`
again, so that they can be differentiated too.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn
from weakref import ref

import chainer
import numpy as np
from chainer import Variable, backend

from chainermn_comm import CommunicatorBase, RankMismatchError

from .cancellation import (
    abandon,
    call_of_dropped,
    raise_refused,
    recv_was_dropped,
    refuse_dropped,
    send_was_dropped,
    was_abandoned,
)
from .collective_ops import wanted
from .control_dependencies import (
    brought_beside,
    empty_beside,
    go_on,
    pseudo_connect,
    zeros_for,
)
from .messages import (
    GRADIENT_TAG,
    SEND,
    UNNUMBERED,
    Letter,
    Said,
    fetch,
    note,
)
from .ordered_function import (
    FUNCTIONS,
    NOTHING,
    Communication,
    setting,
    unchecked,
)

# Letters of this process are numbered, and those that may still be answered are known.
_numbers = itertools.count()
_unanswered: dict[int, ref[Send]] = {}


def dispatch(
    variables: tuple[Variable, ...],
    arrays: tuple[Any, ...],
    communicator: CommunicatorBase,
    peer: int,
    tag: int,
) -> tuple[Variable, Send]:
    """Send variables of these arrays; returns the delegate variable and its function."""
    number, wants = next(_numbers), bytes(wanted(variables))
    _post(note(wants), arrays, communicator, peer, tag, number)
    # The rest while the other rank goes on with the letter.
    node = Send(number, communicator, peer, tag, wants)
    return node.apply(variables)[0], node


def answer(
    number: int,
    gradients: tuple[Variable, ...],
    positions: tuple[int, ...],
    communicator: CommunicatorBase,
    peer: int,
    final: bool,
) -> Variable:
    """Send gradients that can be differentiated; returns what leads back to that.

    See :class:`Said` for positions and final; the number is that of the letter.
    """
    own, wants = next(_numbers), bytes(wanted(gradients))
    said = note(wants, positions, True, 0, final, own)
    arrays = tuple([gradient.array for gradient in gradients])
    _post(said, arrays, communicator, peer, GRADIENT_TAG, number)
    return Send(own, communicator, peer, GRADIENT_TAG, wants).apply(gradients)[0]


def _post(
    said: bytes,
    arrays: tuple[Any, ...],
    communicator: CommunicatorBase,
    peer: int,
    tag: int,
    number: int,
) -> None:
    if not arrays or type(arrays[0]) is np.ndarray:  # then all are
        communicator.send_noted(said, arrays, peer, tag, SEND, number)
    else:
        with chainer.using_device(backend.get_device_from_array(*arrays)):
            communicator.send_noted(said, arrays, peer, tag, SEND, number)


class Expected(NamedTuple):
    """The end of an edge, made before its letter has come: as if it brought one array."""

    node: Recv
    inputs: tuple[Variable, ...]
    output: Variable


def expect(
    communicator: CommunicatorBase, peer: int, tag: int, delegate: Variable | None
) -> Expected | None:
    """What can be made of the end of an edge before its letter has come; None where nothing can."""
    if not setting("enable_backprop"):
        return None
    leaf = unchecked(NOTHING, True)
    inputs = (leaf,) if delegate is None else (delegate, leaf)
    node = Recv(communicator, peer, tag, delegate is not None)
    return Expected(node, inputs, *node.finish(inputs, (None,))) if node.begin(inputs) else None


def deliver(
    letter: Letter,
    communicator: CommunicatorBase,
    peer: int,
    tag: int,
    delegate: Variable | None,
    expected: Expected | None = None,
) -> tuple[tuple[Variable, ...], Recv | None]:
    """The letter's arrays as variables whose backward answers it and goes on to the delegate.

    Also the function whose backward that is; None if there is none.
    """
    number, said, arrays = letter
    wants = said.wants
    if 1 not in wants and (delegate is None or not delegate.requires_grad):
        return tuple([unchecked(array, False) for array in arrays]), None
    outputs: tuple[Variable, ...]
    if expected is not None and len(arrays) == 1 and type(arrays[0]) is np.ndarray:
        node, _, output = expected
        output.array = arrays[0]
        outputs = (output,)
    elif expected is not None and all([type(array) is np.ndarray for array in arrays]):
        node, inputs, _ = expected
        outputs = node.finish(inputs, arrays)
    elif not setting("enable_backprop"):
        return tuple([unchecked(array, False) for array in arrays]), None
    else:
        inputs = () if delegate is None else (brought_beside((*arrays, None)[0], delegate),)
        if 1 in wants:  # without an input that requires a gradient backward would not come here
            inputs += (Variable(empty_beside(arrays[0])),)
        node = Recv(communicator, peer, tag, delegate is not None)
        node.arrays = arrays
        outputs = node.apply(inputs)
    node.take(number if said.own == UNNUMBERED else said.own, said)
    if 0 in wants and delegate is None:
        outputs = tuple(
            [
                output if asked else unchecked(array, False)
                for output, array, asked in zip(outputs, arrays, wants, strict=True)
            ]
        )
    return outputs, node


class Send(Communication):
    """The end of an edge that sends: its inputs travel, its output is an empty delegate."""

    _due: int | None = None  # the tag, once somebody has to see to it that backward comes here

    def __init__(
        self, number: int, communicator: CommunicatorBase, peer: int, tag: int, wants: bytes
    ) -> None:
        self._number = number
        self._communicator = communicator
        self._peer = peer
        self._tag = tag
        self._wants = wants
        self._arrived: deque[Letter] = deque()
        self._inside = f"{FUNCTIONS}backward of send(rank={peer}, tag={tag})"
        _unanswered[number] = ref(self)

    def watch(self) -> None:
        """Let it be told if this is dropped before backward came here."""
        self._due = self._tag if 1 in self._wants else None

    def __del__(self, forget: Any = _unanswered.pop) -> None:  # a global may be gone at exit
        forget(self._number, None)
        if self._due is not None:
            send_was_dropped(self._number, self._communicator.rank, self._peer, self._due)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if inputs:
            self.empty = empty_beside(inputs[0])
        return (self.empty,)

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        self._due = None
        graph = bool(setting("enable_backprop"))
        results: tuple[Variable, ...] = ()
        positions: Sequence[int] = ()
        if 1 in self._wants:
            first = unchecked(None, False)  # made while the letter is on its way
            refuse_dropped(self._communicator)
            letter = (
                self._arrived.popleft()
                if self._arrived
                else fetch(self._communicator, self._peer, GRADIENT_TAG, self._inside)
            )
            if letter[0] != self._number:
                letter = self._sorted(letter)
            _, said, arrays = letter
            if said.graph != graph or said.refusal:
                self._refuse(said, graph)
            if 1 in said.wants:
                # A second backward through the gradients asks for this edge's gradients again.
                again = self.thread()
                results, _ = deliver(letter, self._communicator, self._peer, GRADIENT_TAG, again)
            else:
                results = filled(first, arrays)
            positions = said.positions
        if positions or len(results) != len(indexes):
            found = dict(zip(positions or range(len(results)), results, strict=True))
            # Zeros and not None elsewhere, so that backward reaches what lies before this edge:
            # other ranks may wait for it.
            results = tuple(
                [
                    found[index] if index in found else zeros_for(self, index, self._xp)
                    for index in indexes
                ]
            )
        return go_on(grad_outputs, results) if graph else results

    def _sorted(self, letter: Letter) -> Letter:
        """Keep gradients of other sends that come first for these, and wait for our own."""
        while letter[0] != self._number:
            number, said, _ = letter
            known = _unanswered.get(number)
            owner = known() if known else None
            if owner is not None:
                owner._arrived.append(letter)
            elif not said.refusal and not was_abandoned(number):
                abandon(self._number)
                raise RuntimeError(_of_unknown(number, self._communicator.rank, self._peer))
            letter = fetch(self._communicator, self._peer, GRADIENT_TAG, self._inside)
        return letter

    def _refuse(self, said: Said, graph: bool) -> NoReturn:
        """Raise: there are no gradients, or only one of the ranks differentiates them again."""
        here, there = self._communicator.rank, self._peer
        if said.refusal:
            raise_refused(here, there, self._tag, said.refusal)
        with_graph, without = (here, there) if graph else (there, here)
        raise RankMismatchError(
            f"rank {here}: backward of send(rank={there}, tag={self._tag}): rank {with_graph} runs "
            f"it with enable_double_backprop=True and rank {without} without, so a second "
            "derivative would lack a part; use it on both ranks"
        )


class Recv(Communication):
    """The end of an edge that receives.

    Inputs: the delegate, if there is one, and, if any gradient is wanted, a leaf that requires
    one. Outputs: the letter's arrays.
    """

    _due: int | None = None  # as for Send
    arrays: tuple[Any, ...] = ()  # what `forward` is to return

    def __init__(
        self, communicator: CommunicatorBase, peer: int, tag: int, has_delegate: bool
    ) -> None:
        self._inside = f"{FUNCTIONS}backward of recv(rank={peer}, tag={tag})"
        self._communicator = communicator
        self._peer = peer
        self._has_delegate = has_delegate
        self._leads_nowhere = not has_delegate

    def take(self, number: int, said: Said) -> None:
        """Go on with the letter that is answered by this number and says this."""
        self._number, self._wants, self._final = number, said.wants, said.final

    def watch(self, tag: int, leads_nowhere: bool) -> None:
        """Let it be told if this is dropped before backward came here.

        Args:
            tag: the letter's.
            leads_nowhere: whether the delegate leads to no variable of this rank's own.
        """
        self._due = tag if 1 in self._wants else None
        self._leads_nowhere |= leads_nowhere

    def __del__(self) -> None:
        if self._due is not None:
            recv_was_dropped(self._communicator, self._peer, self._due, self._number)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        arrays, self.arrays = self.arrays, ()  # whose memory isn't ours to hold
        self.empty = empty_beside((*arrays, *inputs)[0])
        return arrays

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        self._due = None
        sent: Variable | None = None
        gradients: tuple[Variable, ...] = ()
        positions: tuple[int, ...] = ()
        wants = self._wants
        if 1 in wants:
            gradients = grad_outputs[: len(wants)]
            if 0 in wants or gradients[0] is None or len(wants) > 1:
                found = {i: g for i, g in enumerate(gradients) if wants[i] and g is not None}
                gradients = tuple(found.values())
                positions = () if len(found) == len(wants) else tuple(found)
            if self._final:
                self._refuse_final(gradients)
            elif setting("enable_backprop"):
                final = self._leads_nowhere or 0 not in indexes
                if gradients:
                    connected = pseudo_connect(self.thread(), *gradients)
                    gradients = connected if isinstance(connected, tuple) else (connected,)
                sent = answer(
                    self._number, gradients, positions, self._communicator, self._peer, final
                )
            else:
                arrays = tuple([gradient.array for gradient in gradients])
                self._communicator.send_noted(
                    note(bytes(len(arrays)), positions),
                    arrays,
                    self._peer,
                    GRADIENT_TAG,
                    self._inside,
                    self._number,
                )
        if not self._has_delegate:
            return (None,) * len(indexes)
        taken = positions or range(len(gradients))
        others = tuple(g for position, g in enumerate(grad_outputs) if position not in taken)
        (zeros,) = go_on((sent, *others), (zeros_for(self, 0, self._xp),))
        return tuple(None if index else zeros for index in indexes)

    def _refuse_final(self, gradients: tuple[Variable, ...]) -> None:
        here, there = self._communicator.rank, self._peer
        if gradients:
            raise RankMismatchError(
                f"rank {here}: gradients that came from rank {there} can't be differentiated "
                f"again: rank {there} received what they belong to without a delegate_variable "
                "that requires a gradient, as the first component of a MultiNodeChainList does, so "
                "that a second backward has nothing there to start from. Give recv one, and go on "
                "from its gradient"
            )


def filled(first: Variable, arrays: tuple[Any, ...]) -> tuple[Variable, ...]:
    """Variables of these arrays, of which the first one was made before."""
    if not arrays:
        return ()
    first.array = arrays[0]
    return (first, *[unchecked(array, False) for array in arrays[1:]])


def _of_unknown(number: int, here: int, there: int) -> str:
    """What is said of gradients for a send that is gone."""
    call = call_of_dropped(number)
    if call is None:
        why = (
            f"its delegate variable was dropped, or backward ran more often on rank {there} than "
            "here"
        )
    else:
        why = f"the delegate variable that {call} returned was dropped"
    return (
        f"rank {here}: rank {there} ran backward through a variable whose send on "
        f"rank {here} is gone: {why}. Keep the result of send with pseudo_connect or as "
        "delegate_variable of the next recv, and run backward equally often on both; or send "
        "without gradients (the variable's array)"
    )

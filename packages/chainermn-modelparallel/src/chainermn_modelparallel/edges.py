"""The two ends of an edge of the computational graph from one rank to another.

Backward runs it the other way: the gradients go from `Recv` to `Send`, by a `Send` and a `Recv`
again, so that they can be differentiated too.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, TypeAlias
from weakref import ref

import chainer
import numpy as np
from chainer import Variable, backend

from chainermn_comm import CommunicatorBase, RankMismatchError
from chainermn_modelparallel.communication import Communication, setting, unchecked
from chainermn_modelparallel.delegates import (
    LEAF,
    brought_beside,
    empty_beside,
    go_on,
    leaf_beside,
    pseudo_connect,
    zeros_for,
)
from chainermn_modelparallel.letters import GRADIENT_TAG, UNNUMBERED, Letter, fetch, post
from chainermn_modelparallel.refusals import (
    abandon,
    call_of_dropped,
    raise_refused,
    recv_was_dropped,
    refuse_dropped,
    send_was_dropped,
    was_abandoned,
)
from chainermn_modelparallel.verbs import wants_gradient

# Letters of this process are numbered, and those that may still be answered are known.
_numbers = itertools.count()
_unanswered: dict[int, ref[Send]] = {}

Expected: TypeAlias = "tuple[Recv, tuple[Variable, ...]]"


def dispatch(node: Send, variables: tuple[Variable, ...]) -> Variable:
    """Send a node's letter and make the graph that leads back to it: the delegate variable."""
    arrays = tuple([variable.array for variable in variables])
    if backend.get_array_module(*arrays) is np:
        node.post(arrays)
    else:
        with chainer.using_device(backend.get_device_from_array(*arrays)):
            node.post(arrays)
    return node.apply(variables)[0]  # while the other rank goes on with the letter


def expect(
    communicator: CommunicatorBase, peer: int, tag: int, delegate: Variable | None
) -> Expected | None:
    """What can be made of the end of an edge before its letter has come; None where nothing can."""
    inputs = (LEAF,) if delegate is None else (delegate, LEAF)
    node = Recv(communicator, peer, tag, delegate is not None)
    return (node, inputs) if node.begin(inputs) else None


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
    arrays, wanted = letter.arrays, True in letter.wants
    leads_back = wanted or (delegate is not None and delegate.requires_grad)
    if not leads_back or not setting("enable_backprop"):
        return tuple([unchecked(array, False) for array in arrays]), None
    if expected is not None and all([type(array) is np.ndarray for array in arrays]):
        node, inputs = expected
        node.take(letter)
        received = node.finish(inputs, node.forward(tuple([x.raw_array for x in inputs])))
    else:
        inputs = () if delegate is None else (brought_beside((*arrays, None)[0], delegate),)
        if wanted:
            inputs += (leaf_beside(arrays[0]),)
        node = Recv(communicator, peer, tag, delegate is not None)
        node.take(letter)
        received = node.apply(inputs)
    if delegate is not None or all(letter.wants):
        return received, node
    outputs = tuple(
        output if wants else unchecked(array, False)
        for output, array, wants in zip(received, arrays, letter.wants, strict=True)
    )
    return outputs, node


class Send(Communication):
    """The end of an edge that sends: its inputs travel, its output is an empty delegate."""

    _due: int | None = None  # the tag, once somebody has to see to it that backward comes here

    def __init__(
        self,
        communicator: CommunicatorBase,
        peer: int,
        tag: int,
        variables: tuple[Variable, ...],
        answers: int = UNNUMBERED,
        positions: tuple[int, ...] | None = None,
        final: bool = False,
    ) -> None:
        self._number = next(_numbers)
        self._communicator = communicator
        self._peer = peer
        self._tag = tag
        self._answers = answers
        self._final = final
        self._positions = tuple(range(len(variables))) if positions is None else positions
        self._wants = tuple([wants_gradient(variable) for variable in variables])
        self._arrived: deque[Letter] = deque()

    def watch(self) -> None:
        """Let it be told if this is dropped before backward came here."""
        self._due = self._tag if any(self._wants) else None

    def __del__(self, forget: Any = _unanswered.pop) -> None:  # a global may be gone at exit
        forget(self._number, None)
        if self._due is not None:
            send_was_dropped(self._number, self._communicator.rank, self._peer, self._due)

    def post(self, arrays: tuple[Any, ...]) -> None:
        """Send the letter."""
        # Known before it leaves, since its answer may be read while we wait for another.
        _unanswered[self._number] = ref(self)
        graph = self._answers != UNNUMBERED
        letter = Letter(
            self._number,
            self._answers,
            self._wants,
            self._positions,
            arrays,
            graph,
            0,
            self._final,
        )
        post(letter, self._communicator, self._peer, self._tag)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._xp = backend.get_array_module(*inputs)
        self.retain_outputs((0,))
        return (empty_beside(inputs[0]) if inputs else np.empty(0, np.float32),)

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        found: dict[int, Variable] = {}
        self._due = None
        if True in self._wants:
            letter = self._answer()
            self._check(letter)
            # A second backward through the gradients asks for this edge's gradients again.
            again = self.thread() if True in letter.wants else None
            variables, _ = deliver(letter, self._communicator, self._peer, GRADIENT_TAG, again)
            found = dict(zip(letter.positions, variables, strict=True))
        # Zeros and not None elsewhere, so that backward reaches what lies before this edge:
        # other ranks may wait for it.
        results = tuple(
            [
                found[index] if index in found else zeros_for(self, index, self._xp)
                for index in indexes
            ]
        )
        return go_on(grad_outputs, results)

    def _answer(self) -> Letter:
        """Wait for the gradients; those of other sends that come first are kept for them."""
        here, there = self._communicator.rank, self._peer
        refuse_dropped(self._communicator)
        while not self._arrived:
            inside = f"backward of send(rank={there}, tag={self._tag})"
            letter = fetch(self._communicator, there, GRADIENT_TAG, inside)
            if letter.answers == self._number:
                return letter
            known = _unanswered.get(letter.answers)
            owner = known() if known else None
            if owner is not None:
                owner._arrived.append(letter)
            elif not letter.refusal and not was_abandoned(letter.answers):
                abandon(self._number)
                raise RuntimeError(_of_unknown(letter, here, there))
        return self._arrived.popleft()

    def _check(self, letter: Letter) -> None:
        """Raise unless there are gradients, and both ranks, or none, differentiate them again."""
        here, there = self._communicator.rank, self._peer
        if letter.refusal:
            raise_refused(here, there, self._tag, letter.refusal)
        mine = bool(setting("enable_backprop"))
        if letter.graph == mine:
            return
        with_graph, without = (here, there) if mine else (there, here)
        raise RankMismatchError(
            f"rank {here}: backward of send(rank={there}, tag={self._tag}): rank {with_graph} runs "
            f"it with enable_double_backprop=True and rank {without} without, so a second "
            "derivative would lack a part; use it on both ranks"
        )


class Recv(Communication):
    """The end of an edge that receives.

    Inputs: the delegate, if there is one, and, if any gradient is wanted, a leaf that requires
    one. Outputs: the letter's arrays and an empty one that a second backward hangs on to.
    """

    thread_apart = True
    _due: int | None = None  # as for Send

    def __init__(
        self, communicator: CommunicatorBase, peer: int, tag: int, has_delegate: bool
    ) -> None:
        self._inside = f"backward of recv(rank={peer}, tag={tag})"
        self._communicator = communicator
        self._peer = peer
        self._has_delegate = has_delegate
        self._leads_nowhere = not has_delegate

    def take(self, letter: Letter) -> None:
        """Go on with this letter."""
        self._arrays: tuple[Any, ...] = letter.arrays
        self._number, self._wants, self._final = letter.number, letter.wants, letter.final

    def watch(self, tag: int, leads_nowhere: bool) -> None:
        """Let it be told if this is dropped before backward came here.

        Args:
            tag: the letter's.
            leads_nowhere: whether the delegate leads to no variable of this rank's own.
        """
        self._due = tag if any(self._wants) else None
        self._leads_nowhere |= leads_nowhere

    def __del__(self) -> None:
        if self._due is not None:
            recv_was_dropped(self._communicator, self._peer, self._due, self._number)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        arrays, self._arrays = self._arrays, ()  # whose memory isn't ours to hold
        self._xp = backend.get_array_module(inputs[0])
        self.retain_outputs((len(arrays),))
        return (*arrays, empty_beside((*arrays, *inputs)[0]))

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        self._due = None
        sent: Variable | None = None
        found: dict[int, Variable] = {}
        if True in self._wants:
            found = {
                position: gradient
                for position, gradient in enumerate(grad_outputs[: len(self._wants)])
                if gradient is not None and self._wants[position]
            }
            if self._final:
                self._refuse_final(found)
            elif setting("enable_backprop"):
                sent = self._answer_with_graph(found, self._leads_nowhere or 0 not in indexes)
            else:
                arrays = tuple([gradient.array for gradient in found.values()])
                unwanted = (False,) * len(arrays)
                letter = Letter(UNNUMBERED, self._number, unwanted, tuple(found), arrays)
                post(letter, self._communicator, self._peer, GRADIENT_TAG, self._inside)
        if not self._has_delegate:
            return (None,) * len(indexes)
        others = tuple(g for position, g in enumerate(grad_outputs) if position not in found)
        (zeros,) = go_on((sent, *others), (zeros_for(self, 0, self._xp),))
        return tuple(None if index else zeros for index in indexes)

    def _refuse_final(self, found: dict[int, Variable]) -> None:
        here, there = self._communicator.rank, self._peer
        if found:
            raise RankMismatchError(
                f"rank {here}: gradients that came from rank {there} can't be differentiated "
                f"again: rank {there} received what they belong to without a delegate_variable "
                "that requires a gradient, as the first component of a MultiNodeChainList does, so "
                "that a second backward has nothing there to start from. Give recv one, and go on "
                "from its gradient"
            )

    def _answer_with_graph(self, found: dict[int, Variable], final: bool) -> Variable:
        """Send gradients that can be differentiated; returns what leads back to that."""
        gradients = tuple(found.values())
        if gradients:
            connected = pseudo_connect(self.thread(), *gradients)
            gradients = connected if isinstance(connected, tuple) else (connected,)
        node = Send(
            self._communicator,
            self._peer,
            GRADIENT_TAG,
            gradients,
            answers=self._number,
            positions=tuple(found),
            final=final,
        )
        return dispatch(node, gradients)


def _of_unknown(letter: Letter, here: int, there: int) -> str:
    """What is said of gradients for a send that is gone."""
    call = call_of_dropped(letter.answers)
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

"""`send` and `recv`: an edge of the computational graph from one rank to another.

A :class:`Send` and a :class:`Recv` are the two ends of such an edge. Backward runs it the other
way: the gradients go from `Recv` to `Send`, by a `Send` and a `Recv` again, so that they can be
differentiated too.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any
from weakref import WeakValueDictionary, finalize

import chainer
import numpy as np
from chainer import Variable, backend

from chainermn_comm import CommunicatorBase, RankMismatchError
from chainermn_modelparallel.communication import Communication
from chainermn_modelparallel.delegates import (
    brought_beside,
    empty_beside,
    pseudo_connect,
    zeros_for,
)
from chainermn_modelparallel.letters import GRADIENT_TAG, Letter, check_peer, fetch, post
from chainermn_modelparallel.watching import call_of_dropped, watch_recv, watch_send

# Letters of this process are numbered, and those that may still be answered are known.
_numbers = itertools.count()
_unanswered: WeakValueDictionary[int, Send] = WeakValueDictionary()


def send(x: Any, communicator: CommunicatorBase, rank: int, tag: int = 0) -> Variable:
    """Send variables to another rank, which calls :func:`recv`.

    Not collective: the two ranks take part. ``backward`` of the result waits for the gradients
    from the other rank and goes on with them; so the other rank has to run backward too. No
    gradients are waited for, nor sent there, for variables that need none here: arrays,
    integers, ``requires_grad=False``, and all of them under ``chainer.no_backprop_mode()``.
    One ``backward`` comes to what was sent, received and communicated collectively in the reverse
    of the order in which that was done. Call several of them in the reverse order of the sends, on
    both ranks: gradients find their send in any order, but large ones keep the rank that sends
    them until the other receives, so that two ranks could wait for each other.

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
        TypeError: an argument is of the wrong type, or an array holds Python objects.
        ValueError: there is no such other rank or tag, ``x`` is empty, or a parameter in it is
            not initialised. Nothing has been sent then, and the other rank still waits.
    """
    rank, tag = check_peer(communicator, rank, tag)
    variables = _variables(x, communicator.rank)
    node = Send(communicator, rank, tag, variables)
    (delegate,) = node.apply(variables)
    node.watch()
    return delegate


def recv(
    communicator: CommunicatorBase,
    rank: int,
    delegate_variable: Variable | None = None,
    tag: int = 0,
    force_tuple: bool = False,
) -> Any:
    """Receive the variables that another rank sends with :func:`send`.

    Not collective: the two ranks take part. ``backward`` of the result sends the gradients to
    the other rank, if that rank has use for them; then it goes on to ``delegate_variable``.
    Received variables without a gradient of their own count as having one of zeros there. Call
    several ``backward`` in the reverse order of the sends, as for :func:`send`. The
    gradient itself can be differentiated (``enable_double_backprop=True`` on both ranks); the
    gradient of ``delegate_variable`` is then where this rank's second backward starts.

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
    outputs, _ = recv_with_thread(communicator, rank, delegate_variable, tag)
    return outputs[0] if len(outputs) == 1 and not force_tuple else outputs


def recv_with_thread(
    communicator: CommunicatorBase,
    rank: int,
    delegate_variable: Variable | None = None,
    tag: int = 0,
) -> tuple[tuple[Variable, ...], Variable | None]:
    """What :func:`recv` returns as a tuple, and a delegate variable that leads back to it.

    Backward through that one answers the letter even if nothing else uses what it brought. It is
    None where there is nothing to go back to.
    """
    rank, tag = check_peer(communicator, rank, tag)
    if delegate_variable is not None and not isinstance(delegate_variable, Variable):
        raise TypeError(
            f"rank {communicator.rank}: delegate_variable must be a chainer.Variable, "
            f"got {type(delegate_variable).__name__}"
        )
    letter = fetch(communicator, rank, tag)
    if any(letter.wants) and not chainer.config.enable_backprop:
        here = communicator.rank
        raise RankMismatchError(
            f"rank {here}: recv(rank={rank}, tag={tag}) runs in no_backprop_mode, but rank {rank} "
            f"called send(rank={here}, tag={tag}) outside of it and would wait for gradients; use "
            "the mode on both ranks, or send what needs no gradient (the variable's array)"
        )
    variables, thread = _deliver(letter, communicator, rank, delegate_variable)
    if thread is not None and thread.creator_node is not None:
        thread.creator_node.watch(tag)
    return variables, thread


class Send(Communication):
    """The end of an edge that sends: its inputs travel, its output is an empty delegate."""

    def __init__(
        self,
        communicator: CommunicatorBase,
        peer: int,
        tag: int,
        variables: tuple[Variable, ...],
        answers: int | None = None,
        positions: tuple[int, ...] | None = None,
    ) -> None:
        self._communicator = communicator
        self._peer = peer
        self._tag = tag
        self._answers = answers
        self._positions = tuple(range(len(variables))) if positions is None else positions
        self._wants = tuple(_wants_gradient(variable) for variable in variables)
        self._number = next(_numbers)
        self._arrived: deque[Letter] = deque()
        self._watch: finalize | None = None

    def watch(self) -> None:
        """Let it be told if this is dropped before backward came here."""
        if any(self._wants):
            here = self._communicator.rank
            self._watch = watch_send(self, self._number, here, self._peer, self._tag)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        self._xp = backend.get_array_module(*inputs)
        # Known before the letter leaves, since its answer may be read while we wait for another.
        _unanswered[self._number] = self
        graph = self._answers is not None
        letter = Letter(self._number, self._answers, self._wants, self._positions, inputs, graph)
        post(letter, self._communicator, self._peer, self._tag)
        self.retain_outputs((0,))
        return (empty_beside(inputs[0]) if inputs else np.empty(0, np.float32),)

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        found: dict[int, Variable] = {}
        if self._watch is not None:
            self._watch.detach()
        if any(self._wants):
            letter = self._answer()
            self._check_graph(letter)
            # A second backward through the gradients asks for this edge's gradients again.
            again = self.get_retained_outputs()[0] if any(letter.wants) else None
            variables, _ = _deliver(letter, self._communicator, self._peer, again)
            found = dict(zip(letter.positions, variables, strict=True))
        # Zeros and not None elsewhere, so that backward reaches what lies before this edge:
        # other ranks may wait for it.
        return tuple(
            found[index] if index in found else zeros_for(self, index, self._xp)
            for index in indexes
        )

    def _answer(self) -> Letter:
        """Wait for the gradients; those of other sends that come first are kept for them."""
        here, there = self._communicator.rank, self._peer
        while not self._arrived:
            letter = fetch(self._communicator, there, GRADIENT_TAG)
            owner = _unanswered.get(letter.answers if letter.answers is not None else -1)
            if owner is None:
                call = call_of_dropped(letter.answers)
                why = (
                    f"its delegate variable was dropped, or backward ran more often on rank {there}"
                    " than here"
                )
                if call is not None:
                    why = f"the delegate variable that {call} returned was dropped"
                raise RuntimeError(
                    f"rank {here}: rank {there} ran backward through a variable whose send on "
                    f"rank {here} is gone: {why}. Keep the result of send with "
                    "pseudo_connect or as delegate_variable of the next recv, and run backward "
                    "equally often on both; or send without gradients (the variable's array)"
                )
            owner._arrived.append(letter)
        return self._arrived.popleft()

    def _check_graph(self, letter: Letter) -> None:
        """Raise unless both ranks, or none, want to differentiate the gradients again."""
        mine = bool(chainer.config.enable_backprop)
        if letter.graph == mine:
            return
        here, there = self._communicator.rank, self._peer
        with_graph, without = (here, there) if mine else (there, here)
        raise RankMismatchError(
            f"rank {here}: backward of send(rank={there}, tag={self._tag}): rank {with_graph} runs "
            f"it with enable_double_backprop=True and rank {without} without, so a second "
            "derivative would lack a part; use it on both ranks"
        )


class Recv(Communication):
    """The end of an edge that receives.

    Inputs: the delegate, if there is one, and, if any gradient is wanted, a leaf that requires
    one, without which Chainer would not call ``backward``. Outputs: the letter's arrays and an
    empty one that a second backward hangs on to.
    """

    def __init__(self, letter: Letter, communicator: CommunicatorBase, peer: int) -> None:
        self._letter: Letter | None = letter
        self._number, self._wants = letter.number, letter.wants
        self._communicator = communicator
        self._peer = peer
        self._watch: finalize | None = None

    def watch(self, tag: int) -> None:
        """Let it be told if this is dropped before backward came here."""
        if any(self._wants):
            self._watch = watch_recv(self, self._communicator.rank, self._peer, tag)

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        assert self._letter is not None
        self._xp = backend.get_array_module(*inputs)
        arrays, self._letter = self._letter.arrays, None  # whose memory isn't ours to hold
        self.retain_outputs((len(arrays),))
        return (*arrays, empty_beside((*arrays, *inputs)[0]))

    def backward(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable | None, ...]:
        zeros = tuple(zeros_for(self, index, self._xp) for index in indexes)
        if self._watch is not None:
            self._watch.detach()
        if not any(self._wants):
            return zeros
        found = {
            position: gradient
            for position, gradient in enumerate(grad_outputs[:-1])
            if gradient is not None and self._wants[position]
        }
        if not chainer.config.enable_backprop:  # no graph of the gradients: the letter will do
            arrays = tuple(gradient.array for gradient in found.values())
            unwanted = (False,) * len(arrays)
            letter = Letter(next(_numbers), self._number, unwanted, tuple(found), arrays)
            post(letter, self._communicator, self._peer, GRADIENT_TAG)
            return zeros
        gradients = tuple(found.values())
        if gradients:
            # A second backward comes back here, whether or not the gradients depend on us:
            # the other rank will wait for it.
            gradients = _several(pseudo_connect(self.get_retained_outputs()[0], *gradients))
        answer = Send(
            self._communicator,
            self._peer,
            GRADIENT_TAG,
            gradients,
            answers=self._number,
            positions=tuple(found),
        )
        (sent,) = answer.apply(gradients)
        return _several(pseudo_connect(sent, *zeros))


def _deliver(
    letter: Letter, communicator: CommunicatorBase, peer: int, delegate: Variable | None
) -> tuple[tuple[Variable, ...], Variable | None]:
    """The letter's arrays as variables whose backward answers it and goes on to the delegate.

    Also a variable without data, by which backward comes here too; None if it need not.
    """
    arrays, inputs = letter.arrays, []
    if delegate is not None:
        inputs.append(brought_beside(arrays[0], delegate) if arrays else delegate)
    if any(letter.wants):
        inputs.append(Variable(empty_beside(arrays[0])))
    if not inputs:
        return tuple(Variable(array, requires_grad=False) for array in letter.arrays), None
    *received, thread = Recv(letter, communicator, peer).apply(tuple(inputs))
    if delegate is not None:
        return tuple(received), thread
    outputs = tuple(
        output if wanted else Variable(array, requires_grad=False)
        for output, array, wanted in zip(received, arrays, letter.wants, strict=True)
    )
    return outputs, thread


def _variables(x: Any, rank: int) -> tuple[Variable, ...]:
    """What the user wants to send, checked, as variables."""
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
    return tuple(chainer.as_variable(item) for item in items)


def _wants_gradient(variable: Variable) -> bool:
    return bool(
        chainer.config.enable_backprop and variable.requires_grad and variable.dtype.kind == "f"
    )


def _several(outputs: Any) -> tuple[Variable, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)

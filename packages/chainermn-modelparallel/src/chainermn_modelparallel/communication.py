"""What communicates is visited by backward in the reverse of the order in which it ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import ref

import chainer
import numpy as np
from chainer import Variable

# In reports of the watchdog, before the name of the function that waits.
FUNCTIONS = "chainermn.functions: "
# What a reference to an output becomes once nobody holds it; Chainer then makes it when asked.
_NO_NODE: ref[Any] = ref(set())
# Of Chainer by name: as an attribute each is looked up in vain first, for a microsecond.
setting: Callable[[str], Any] = chainer.config.__getattr__


class Communication(chainer.FunctionNode):
    """A function of the graph that talks to other ranks, forward and backward.

    Of the functions that it has reached, Chainer's backward visits the one of the highest `rank`
    first: a depth in the graph, that need only be higher than those of the functions before. Ours
    are also higher than that of every communication that ran earlier in this process. So ranks
    whose calls met in forward meet in backward too, however deep the rest of their graphs is.
    """

    # Whether the last output, the thread, is left out by `apply`, and made when it is asked for.
    thread_apart: ClassVar[bool] = False
    _depth = 0
    # One number. As an attribute of the class it would make Python look up all others anew.
    _deepest: ClassVar[list[int]] = [0]

    @property
    def rank(self) -> int:
        """Set by Chainer to the greatest depth of the inputs, each time that it is applied."""
        return self._depth

    @rank.setter
    def rank(self, depth: int) -> None:
        self._deepest[0] = self._depth = max(depth, self._deepest[0] + 1)

    def apply(self, inputs: tuple[Any, ...]) -> tuple[Variable, ...]:
        """Run `forward` and build the graph, as Chainer does.

        Short messages spend most of their time there, and most of that in checks of types that
        ours make before they communicate. So those are left out, where the arrays are NumPy's
        and nobody looks on; elsewhere it is left to Chainer.
        """
        if self.begin(inputs):
            return self.finish(
                inputs, self.forward(tuple([variable.raw_array for variable in inputs]))
            )
        outputs = super().apply(inputs)
        return outputs[:-1] if self.thread_apart else outputs

    def begin(self, inputs: tuple[Any, ...]) -> bool:
        """Do what comes before `forward`; False, and nothing is done, where all is Chainer's to do.

        :meth:`finish` may follow later, when there is something to go on with, or never.
        """
        if not _is_plain(self, inputs):
            return False
        self._input_indexes_to_retain = self._output_indexes_to_retain = None
        self._requires_grad = True in [variable.requires_grad for variable in inputs]
        self._input_layouts = (None,) * len(inputs)
        self._builds_graph = bool(setting("enable_backprop"))
        if self._builds_graph:
            self.inputs = tuple([variable.node for variable in inputs])
            self.rank = max([node.rank for node in self.inputs], default=0)
            self.lazy_grad_sum = setting("lazy_grad_sum")
        return True

    def finish(self, inputs: tuple[Any, ...], arrays: tuple[Any, ...]) -> tuple[Variable, ...]:
        """Make variables of what `forward` returned."""
        made = arrays[:-1] if self.thread_apart else arrays
        outputs = tuple([unchecked(array, self._requires_grad) for array in made])
        self._output_layouts = (None,) * len(arrays)
        self._output_count = len(arrays)
        if self._builds_graph:
            nodes: list[Any] = [variable.node for variable in outputs]
            for node in nodes:
                node.creator_node = self
            ends = [ref(node) for node in nodes]
            self.outputs = (*ends, _NO_NODE) if self.thread_apart else tuple(ends)
            self._retain(inputs, nodes, arrays)
        return outputs

    def _retain(self, inputs: tuple[Any, ...], nodes: list[Any], arrays: tuple[Any, ...]) -> None:
        """Keep what `forward` said that backward needs."""
        index: int
        for index in self._input_indexes_to_retain or ():
            inputs[index].retain_data()
        kept = self._output_indexes_to_retain
        if kept is not None:
            for index in kept:
                if index < len(nodes):
                    nodes[index].data = arrays[index]
            self._retained_output_data = tuple([arrays[index] for index in kept])

    def thread(self) -> Variable:
        """The output without data, retained alone, that gradients hang on to.

        By it a second backward comes back here, whether or not the gradients depend on us: it
        will on other ranks.
        """
        (thread,) = self.get_retained_outputs()
        thread.retain_data()  # Chainer forgets them where it made the node anew: not twice
        return thread


def unchecked(array: np.ndarray, requires_grad: bool) -> Variable:
    """A variable of an array of NumPy's, as Chainer makes them of what functions return."""
    return Variable._init_unchecked(array, requires_grad=requires_grad, is_chainerx_array=False)


def _is_plain(function: chainer.FunctionNode, inputs: tuple[Any, ...]) -> bool:
    """Whether these are NumPy's arrays, and no hook, check or recording wants to see them."""
    if (
        chainer.get_function_hooks()
        or function._n_local_function_hooks
        or setting("debug")
        or setting("schedule_func") is not None
    ):
        return False
    for variable in inputs:
        if not isinstance(variable, Variable) or type(variable.raw_array) is not np.ndarray:
            return False
        if variable.layout is not None:
            return False
    return True

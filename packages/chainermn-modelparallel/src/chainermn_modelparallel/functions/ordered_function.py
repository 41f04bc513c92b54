"""What communicates is visited by backward in the reverse of the order in which it ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import ref

import chainer
import numpy as np
from chainer import Variable, backend

# In reports of the watchdog, before the name of the function that waits.
FUNCTIONS = "chainermn.functions: "
NOTHING = np.empty(0, np.float32)
# Of Chainer by name: as an attribute each is looked up in vain first, for a microsecond.
setting: Callable[[str], Any] = chainer.config.__getattr__


class Communication(chainer.FunctionNode):
    """A function of the graph that talks to other ranks, forward and backward.

    Of the functions that it has reached, Chainer's backward visits the one of the highest `rank`
    first: a depth in the graph, that need only be higher than those of the functions before. Ours
    are also higher than that of every communication that ran earlier in this process. So ranks
    whose calls met in forward meet in backward too, however deep the rest of their graphs is.
    """

    # An array without data, set by `forward` if it is not NumPy's.
    empty: Any = NOTHING
    _thread: ref[Any] | None = None
    # One number. As an attribute of the class it would make Python look up all others anew.
    _deepest: ClassVar[list[int]] = [0]

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
        if self.inputs is not None:  # it is part of a graph
            self._deepen(self.rank)
            for output in outputs:
                output.creator_node = self  # of this depth
        return tuple(outputs)

    def begin(self, inputs: tuple[Any, ...]) -> bool:
        """Do what comes before `forward`; False, and nothing is done, where all is Chainer's to do.

        :meth:`finish` may follow, also more than once, or not.
        """
        if not _is_plain(self, inputs):
            return False
        self._requires_grad = True in [variable.requires_grad for variable in inputs]
        self._input_layouts = (None,) * len(inputs)
        self._builds_graph = bool(setting("enable_backprop"))
        if self._builds_graph:
            self.inputs = tuple([variable.node for variable in inputs])
            self._deepen(max([node.rank for node in self.inputs], default=0))
            self.lazy_grad_sum = setting("lazy_grad_sum")
        return True

    def _deepen(self, depth: int) -> None:
        self._deepest[0] = self.rank = max(depth, self._deepest[0] + 1)

    def finish(self, inputs: tuple[Any, ...], arrays: tuple[Any, ...]) -> tuple[Variable, ...]:
        """Make variables of what `forward` returned."""
        outputs = tuple([unchecked(array, self._requires_grad) for array in arrays])
        self._output_layouts = (None,) * len(arrays)
        self._output_count = len(arrays)
        if self._builds_graph:
            ends = []
            for output in outputs:
                node = output.node
                node.creator_node = self
                ends.append(ref(node))
            self.outputs = tuple(ends)
            index: int
            for index in self._input_indexes_to_retain or ():
                inputs[index].retain_data()
        return outputs

    @property
    def _xp(self) -> Any:
        return backend.get_array_module(self.empty)

    def thread(self) -> Variable:
        """An output without data, made when it is first asked for, that gradients hang on to.

        By it a second backward comes back here, whether or not the gradients depend on us: it
        will on other ranks.
        """
        node = self._thread() if self._thread else None
        if node is not None:
            return node.get_variable()
        thread = Variable(self.empty)
        thread.creator_node = self
        thread.retain_data()  # the variable may go before its node, and be made anew
        self._thread = ref(thread.node)
        self.outputs = (*self.outputs[: self._output_count], self._thread)
        return thread


def unchecked(array: Any, requires_grad: bool) -> Variable:
    """A variable, as Chainer makes them of what functions return; None: its array comes later."""
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

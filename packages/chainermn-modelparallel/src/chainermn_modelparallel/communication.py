"""What communicates is visited by backward in the reverse of the order in which it ran."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import ref

import chainer
import numpy as np
from chainer import Variable

# In reports of the watchdog, before the name of the function that waits.
FUNCTIONS = "chainermn.functions: "


class Communication(chainer.FunctionNode):
    """A function of the graph that talks to other ranks, forward and backward.

    Of the functions that it has reached, Chainer's backward visits the one of the highest `rank`
    first: a depth in the graph, that need only be higher than those of the functions before. Ours
    are also higher than that of every communication that ran earlier in this process. So ranks
    whose calls met in forward meet in backward too, however deep the rest of their graphs is.
    """

    _depth = 0
    _deepest: ClassVar[int] = 0

    @property
    def rank(self) -> int:
        """Set by Chainer to the greatest depth of the inputs, each time that it is applied."""
        return self._depth

    @rank.setter
    def rank(self, depth: int) -> None:
        Communication._deepest = self._depth = max(depth, Communication._deepest + 1)

    def apply(self, inputs: tuple[Any, ...]) -> tuple[Variable, ...]:
        """Run `forward` and build the graph, as Chainer does.

        Short messages spend most of their time there, and most of that in checks of types that
        ours make before they communicate. So those are left out, where the arrays are NumPy's
        and nobody looks on; elsewhere it is left to Chainer.
        """
        if not _is_plain(self, inputs):
            return super().apply(inputs)
        self._input_indexes_to_retain = self._output_indexes_to_retain = None
        arrays = self.forward(tuple([variable.array for variable in inputs]))
        requires_grad = any([variable.requires_grad for variable in inputs])
        outputs = tuple([Variable(array, requires_grad=requires_grad) for array in arrays])
        self._input_layouts, self._output_layouts = (None,) * len(inputs), (None,) * len(outputs)
        self._output_count = len(outputs)
        if chainer.config.enable_backprop:
            self.rank = max([variable.rank for variable in inputs], default=0)
            self.inputs = tuple([variable.node for variable in inputs])
            for variable in outputs:
                variable.creator_node = self
            self.outputs = tuple([ref(variable.node) for variable in outputs])
            self._retain(inputs, outputs, arrays)
            self.lazy_grad_sum = chainer.config.lazy_grad_sum
        return outputs

    def _retain(
        self, inputs: tuple[Any, ...], outputs: tuple[Variable, ...], arrays: tuple[Any, ...]
    ) -> None:
        """Keep what `forward` said that backward needs."""
        index: int
        for index in self._input_indexes_to_retain or ():
            inputs[index].retain_data()
        kept = self._output_indexes_to_retain
        if kept is not None:
            for index in kept:
                outputs[index].retain_data()
            self._retained_output_data = tuple([arrays[index] for index in kept])

    def thread(self) -> Variable:
        """The output without data, retained alone, that gradients hang on to.

        By it a second backward comes back here, whether or not the gradients depend on us: it
        will on other ranks.
        """
        (thread,) = self.get_retained_outputs()
        thread.retain_data()  # Chainer forgets them where it made the node anew: not twice
        return thread


def _is_plain(function: chainer.FunctionNode, inputs: tuple[Any, ...]) -> bool:
    """Whether these are NumPy's arrays, and no hook, check or recording wants to see them."""
    return not (
        chainer.get_function_hooks()
        or function._n_local_function_hooks
        or chainer.is_debug()
        or chainer.config.schedule_func is not None
    ) and all(
        [
            isinstance(variable, Variable)
            and type(variable.raw_array) is np.ndarray
            and variable.layout is None
            for variable in inputs
        ]
    )

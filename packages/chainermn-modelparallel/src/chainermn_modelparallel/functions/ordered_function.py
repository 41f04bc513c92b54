"""Functions of the graph that backward visits in the reverse of the order in which they ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias
from weakref import ref

import chainer
import numpy as np
from chainer import Variable, backend

# In reports of the watchdog, before the name of the function that waits.
SCOPE = "chainermn.functions: "
EMPTY = np.empty(0, np.float32)
# Read Chainer's settings by name: as an attribute each is first looked up in vain.
chainer_config: Callable[[str], Any] = chainer.config.__getattr__

Arrays: TypeAlias = tuple[Any, ...]
Variables: TypeAlias = tuple[Variable, ...]
Gradients: TypeAlias = tuple[Variable | None, ...]


class OrderedFunctionNode(chainer.FunctionNode):
    """A function that talks to other ranks, forward and backward.

    Of the functions that it has reached, Chainer's backward visits the one of the
    highest `rank` first: a depth in the graph, that need only be higher than those of
    the functions before. Ours are also higher than that of every communication that ran
    earlier in this process. So ranks whose calls met in forward meet in backward too,
    however deep the rest of their graphs is.
    """

    # An array without data, set by `forward` if it is not NumPy's.
    empty_array: Any = EMPTY
    _control_output: ref[Any] | None = None
    # One number. As an attribute of the class it would make Python look up all others
    # anew.
    _last_sequence: ClassVar[list[int]] = [0]

    def apply(self, inputs: Arrays) -> Variables:
        """Run `forward` and build the graph, as Chainer does.

        Chainer's checks of types take most of the time of a short message, and ours are
        made before anything is sent. So Chainer's are left out where the arrays are
        NumPy's and no hook or debug mode looks on.
        """
        if self.begin_apply(inputs):
            return self.build_outputs(
                inputs, self.forward(tuple([x.raw_array for x in inputs]))
            )
        outputs = super().apply(inputs)
        if self.inputs is not None:  # it is part of a graph
            self._assign_sequence(self.rank)
            for output in outputs:
                output.creator_node = self  # of this depth
        return tuple(outputs)

    def begin_apply(self, inputs: Arrays) -> bool:
        """Do what comes before `forward`; return False, with nothing done, if Chainer has to.

        It has to unless the arrays are NumPy's, and no hook, check or recording looks
        on. :meth:`build_outputs` may follow, also more than once, or not.
        """
        if (
            chainer.get_function_hooks()
            or self._n_local_function_hooks
            or chainer_config("debug")
            or chainer_config("schedule_func") is not None
        ):
            return False
        for x in inputs:
            if not isinstance(x, Variable) or type(x.raw_array) is not np.ndarray:
                return False
            if x.layout is not None:
                return False
        self._requires_grad = True in [variable.requires_grad for variable in inputs]
        self._input_layouts = (None,) * len(inputs)
        self._builds_graph = bool(chainer_config("enable_backprop"))
        if self._builds_graph:
            self.inputs = tuple([variable.node for variable in inputs])
            self._assign_sequence(max([node.rank for node in self.inputs], default=0))
            self.lazy_grad_sum = chainer_config("lazy_grad_sum")
        return True

    def _assign_sequence(self, depth: int) -> None:
        self._last_sequence[0] = self.rank = max(depth, self._last_sequence[0] + 1)

    def build_outputs(self, inputs: Arrays, arrays: Arrays) -> Variables:
        """Make variables of what `forward` returned, as outputs of this function."""
        outputs = tuple([make_variable(array, self._requires_grad) for array in arrays])
        self._output_layouts = (None,) * len(arrays)
        self._output_count = len(arrays)
        if self._builds_graph:
            nodes = [output.node for output in outputs]
            for node in nodes:
                node.creator_node = self
            self.outputs = tuple([ref(node) for node in nodes])
            index: int
            for index in self._input_indexes_to_retain or ():
                inputs[index].retain_data()
        return outputs

    @property
    def _xp(self) -> Any:
        return backend.get_array_module(self.empty_array)

    def control_output(self) -> Variable:
        """Return an output without data, made when it is first asked for, to connect gradients to.

        Through it a second backward comes back here, whether or not the gradients
        depend on this function: it will on other ranks.
        """
        node = self._control_output() if self._control_output else None
        if node is not None:
            return node.get_variable()
        output = Variable(self.empty_array)
        output.creator_node = self
        output.retain_data()  # the variable may go before its node, and be made anew
        self._control_output = ref(output.node)
        self.outputs = (*self.outputs[: self._output_count], self._control_output)
        return output


def make_variable(array: Any, requires_grad: bool) -> Variable:
    """Return a variable without Chainer's checks; None for an array that comes later."""
    return Variable._init_unchecked(
        array, requires_grad=requires_grad, is_chainerx_array=False
    )


def requires_grad_mask(variables: Variables) -> bytes:
    """Return a byte for each variable: 1 where this process needs its gradient."""
    builds_graph = bool(chainer_config("enable_backprop"))
    return bytes(
        [builds_graph and x.requires_grad and x.dtype.kind == "f" for x in variables]
    )


def empty_on_device_of(array: Any) -> Any:
    """Return an array without data, of the array module and device of another."""
    xp = backend.get_array_module(array)
    if xp is np:
        return EMPTY
    with chainer.using_device(backend.get_device_from_array(array)):
        return xp.empty_like(array, dtype=np.float32, shape=(0,))

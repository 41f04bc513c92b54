"""Functions of the graph that backward visits in the reverse of the order in which they ran."""

from __future__ import annotations

from typing import Any

import chainer
from chainer import Variable, backend

from .control_dependencies import (
    Arrays,
    Gradients,
    Variables,
    empty_on_device_of,
    keep_control_dependencies,
)

# In the watchdog's reports, the text before the name of the waiting function.
SCOPE = "chainermn.functions: "

# The highest `rank` that a function of the class below has got.
_last_rank = 0


class OrderedFunctionNode(chainer.FunctionNode):
    """A function that talks to other ranks, forward and backward.

    Among the functions that it has reached, Chainer's backward visits the one of the
    highest `rank` next. This number is the function's depth in the graph, and need only
    be higher than the numbers of the functions before. The number of a function of this
    class is also higher than those of all earlier communications of this process. So
    calls that met in forward meet in backward, too, however deep the rest of each
    rank's graph is.

    The last output of each function is the empty one that :meth:`with_delegate_output`
    adds.
    """

    rank: int

    def apply(self, inputs: Arrays) -> Variables:
        """Run `forward` and build the graph."""
        global _last_rank
        outputs: Variables = super().apply(inputs)
        if self.inputs is not None:  # the function is part of a graph
            self.rank = _last_rank = max(self.rank, _last_rank + 1)
            for output in outputs:
                output.creator_node = self  # the output gets its depth from the node
        return outputs

    def with_delegate_output(self, arrays: Arrays, like: Any) -> Arrays:
        """Return the outputs of `forward` and an empty output on the device of ``like``."""
        self.xp = backend.get_array_module(like)
        self._specs = [(array.shape, array.dtype) for array in arrays]
        self.retain_outputs((len(arrays),))
        empty = empty_on_device_of(like)
        return *arrays, empty

    def delegate_output(self) -> Variable:
        """Return the output without data, on which gradients are made to depend.

        Through this output a second backward reaches this function even if the gradients
        don't depend on it. It must reach the function, because it does on other ranks.
        """
        (output,) = self.get_retained_outputs()
        # The variable's node may be new, and outlives the variable.
        output.retain_data()
        return output

    def connected_gradients(self, grad_outputs: Gradients) -> Variables:
        """Return the gradients of the outputs with data, with zeros for missing gradients.

        A second backward through the gradients reaches this function.
        """
        gradients: Variables = ()
        for spec, gradient in zip(self._specs, grad_outputs, strict=False):
            if gradient is None:
                gradient = Variable(self.xp.zeros(*spec), requires_grad=False)
            gradients += (gradient,)
        control = self.control_gradient(grad_outputs)
        return keep_control_dependencies(control, gradients)

    def control_gradient(self, grad_outputs: Gradients) -> Variables:
        """Return a variable on which to make gradients depend, if they can be differentiated."""
        if not chainer.config.enable_backprop:
            return ()
        return keep_control_dependencies(grad_outputs[-1:], (self.delegate_output(),))


def requires_grad_mask(variables: Variables) -> bytes:
    """Return a byte for each variable: 1 if this process needs its gradient."""
    builds_graph = chainer.config.enable_backprop
    return bytes(
        [builds_graph and x.requires_grad and x.dtype.kind == "f" for x in variables]
    )

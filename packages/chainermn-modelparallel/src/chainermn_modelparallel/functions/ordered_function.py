"""Functions of the graph that backward visits in the reverse of the order in which they ran."""

from __future__ import annotations

from typing import Any, TypeAlias

import chainer
import numpy as np
from chainer import Variable, backend

# In reports of the watchdog, before the name of the function that waits.
SCOPE = "chainermn.functions: "
EMPTY = np.empty(0, np.float32)

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

    The last output of each is empty: what :meth:`with_control_output` returns.
    """

    rank: int
    _last_rank = 0  # of all these functions

    def apply(self, inputs: Arrays) -> Variables:
        """Run `forward` and build the graph."""
        outputs: Variables = super().apply(inputs)
        if self.inputs is not None:  # it is part of a graph
            self.rank = max(self.rank, OrderedFunctionNode._last_rank + 1)
            OrderedFunctionNode._last_rank = self.rank
            for output in outputs:
                output.creator_node = self  # of this depth
        return outputs

    def with_control_output(self, arrays: Arrays, like: Any) -> Arrays:
        """Return outputs, and one without data on the device of ``like``, for `forward`."""
        self.xp = backend.get_array_module(like)
        self.retain_outputs((len(arrays),))
        return *arrays, empty_on_device_of(like)

    def control_output(self) -> Variable:
        """Return the output without data, to connect gradients to.

        Through it a second backward comes back here, whether or not the gradients
        depend on this function: it will on other ranks.
        """
        (output,) = self.get_retained_outputs()
        output.retain_data()  # its node may be a new one, which outlives the variable
        return output


def requires_grad_mask(variables: Variables) -> bytes:
    """Return a byte for each variable: 1 where this process needs its gradient."""
    builds_graph = chainer.config.enable_backprop
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

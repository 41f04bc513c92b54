"""What communicates is visited by backward in the reverse of the order in which it ran."""

from __future__ import annotations

from typing import ClassVar

import chainer
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

    def thread(self) -> Variable:
        """The output without data, retained alone, that gradients hang on to.

        By it a second backward comes back here, whether or not the gradients depend on us: it
        will on other ranks.
        """
        (thread,) = self.get_retained_outputs()
        thread.retain_data()  # Chainer forgets them where it made the node anew: not twice
        return thread

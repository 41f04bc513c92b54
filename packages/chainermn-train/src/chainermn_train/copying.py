"""Lets an object that holds a communicator be copied, and says why it can't be pickled."""

from __future__ import annotations

import copy
from typing import Any, NoReturn


class SharesCommunicator:
    """Copies of an instance, shallow or deep, have its communicator; pickling is refused."""

    def __copy__(self) -> Any:
        twin = type(self).__new__(type(self))
        vars(twin).update(vars(self))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = memo[id(self)] = copy.copy(self)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be pickled, because it holds a communicator, which "
            "belongs to this process; save and load its state with chainer.serializers, or "
            "pickle it before it is made multi-node"
        )

"""A communicator on which the gradients of one optimizer travel in a dtype of their own."""

from __future__ import annotations

from typing import Any

from chainermn_comm import CommunicatorBase, Reducer
from chainermn_comm.config import wire_dtype

from ...wrappers import AttributeProxy

_SETTING = "allreduce_grad_dtype"


class NarrowedCommunicator(AttributeProxy):
    """Forwards to a communicator, but its reducers send gradients in another dtype."""

    _OWN = frozenset({"actual", "_dtype"})

    def __init__(self, communicator: CommunicatorBase, dtype: Any) -> None:
        """Send gradients as ``dtype``; ValueError if there is no such, or already another."""
        super().__init__(communicator)
        if communicator.get_config().get(_SETTING, dtype) is not None:
            raise ValueError(
                "compression with a dtype needs a communicator of create_communicator without "
                "allreduce_grad_dtype: choose one of the two"
            )
        self._dtype = wire_dtype(dtype)

    def make_reducer(self, *arguments: Any) -> Reducer:
        communicator = self.actual
        before = communicator.get_config(_SETTING)
        # A reducer keeps the settings with which it was made.
        communicator.set_config(_SETTING, self._dtype)
        reducer: Reducer = communicator.make_reducer(*arguments)
        communicator.set_config(_SETTING, before)
        return reducer

    def get_config(self, name: str) -> Any:
        if name == _SETTING:
            return self._dtype
        return self.actual.get_config(name)

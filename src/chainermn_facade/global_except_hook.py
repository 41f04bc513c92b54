"""Ends the whole job when one rank fails."""

from chainermn_comm.faults.abort import add_hook, remove_hook

__all__ = ["add_hook", "remove_hook"]

"""Events as ranks write them."""

from _chainermn_events import emit, encode

__all__ = ["emit", "encode"]

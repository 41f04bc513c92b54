"""Iterators that several ranks share (none yet)."""

__all__: list[str] = []

"""Checks of ranks that are started on this machine."""

from __future__ import annotations

from chainermn_tools.doctor.check import Check

__all__ = ["CHECKS"]

# In the order in which they are shown.
CHECKS: tuple[Check, ...] = ()

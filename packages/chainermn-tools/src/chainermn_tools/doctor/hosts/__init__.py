"""Checks of the hosts that the user named."""

from __future__ import annotations

from chainermn_tools.doctor.check import Check

__all__ = ["CHECKS"]

# In the order in which they are shown.
CHECKS: tuple[Check, ...] = ()

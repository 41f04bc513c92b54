"""Checks of this machine, without starting a rank."""

from __future__ import annotations

from chainermn_tools.doctor.check import Check

__all__ = ["CHECKS"]

# In the order in which they are shown.
CHECKS: tuple[Check, ...] = ()

"""Checks of ranks that are started on this machine."""

from chainermn_tools.doctor.live.checks import CHECKS

__all__ = ["CHECKS"]

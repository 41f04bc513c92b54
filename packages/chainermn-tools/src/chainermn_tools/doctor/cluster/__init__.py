"""Checks of the hosts that the user named."""

from chainermn_tools.doctor.cluster import consistency, hosts, network, placement, transfers

__all__ = ["CHECKS"]

# In the order in which they are shown.
CHECKS = (
    *hosts.checks,
    *consistency.checks,
    *network.checks,
    *placement.checks,
    *transfers.checks,
)

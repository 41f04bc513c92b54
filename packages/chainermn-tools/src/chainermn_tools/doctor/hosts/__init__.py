"""Checks of the hosts that the user named."""

from chainermn_tools.doctor.hosts.exchanges import communicators, messages
from chainermn_tools.doctor.hosts.hostfiles import hostfile, slots
from chainermn_tools.doctor.hosts.logins import host_keys, host_names, login
from chainermn_tools.doctor.hosts.network import connections, round_trip
from chainermn_tools.doctor.hosts.places import placement
from chainermn_tools.doctor.hosts.sameness import mpiexec, packages, python, script
from chainermn_tools.doctor.hosts.surroundings import shared_memory, variables

__all__ = ["CHECKS"]

# In the order in which they are shown.
CHECKS = (
    hostfile,
    slots,
    host_names,
    host_keys,
    login,
    variables,
    python,
    packages,
    mpiexec,
    script,
    shared_memory,
    connections,
    round_trip,
    placement,
    messages,
    communicators,
)

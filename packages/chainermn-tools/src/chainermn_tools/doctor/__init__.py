"""Examines this machine, MPI and the hosts, and says what is wrong and how to mend it."""

from chainermn_tools.doctor.check import Finding
from chainermn_tools.doctor.layers import HERE, HOSTS, LIVE
from chainermn_tools.doctor.runner import Layer, examine

__all__ = ["HERE", "HOSTS", "LIVE", "Finding", "Layer", "examine"]

"""Examines this machine, MPI and the hosts, and says what is wrong and how to fix it."""

from chainermn_tools.doctor.check import CheckResult, Context
from chainermn_tools.doctor.ranks import COMMUNICATORS
from chainermn_tools.doctor.runner import HOSTS, LOCAL, RANKS, Stage, run_checks

__all__ = [
    "COMMUNICATORS",
    "HOSTS",
    "LOCAL",
    "RANKS",
    "CheckResult",
    "Context",
    "Stage",
    "run_checks",
]

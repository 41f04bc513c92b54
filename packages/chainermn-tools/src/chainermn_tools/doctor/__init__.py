"""Examines this machine, MPI and the hosts, and says what is wrong and how to mend it."""

from chainermn_tools.doctor.check import CheckResult as CheckResult
from chainermn_tools.doctor.check import Context as Context
from chainermn_tools.doctor.cluster.srun import granted_hosts as granted_hosts
from chainermn_tools.doctor.runner import CLUSTER as CLUSTER
from chainermn_tools.doctor.runner import LOCAL as LOCAL
from chainermn_tools.doctor.runner import RANKS as RANKS
from chainermn_tools.doctor.runner import Stage as Stage
from chainermn_tools.doctor.runner import run_checks as run_checks

"""Starting processes and `mpiexec` jobs, and the facts about launchers that this takes."""

from chainermn_tools.jobs.cores import available_cores
from chainermn_tools.jobs.events import Event, LostProcess
from chainermn_tools.jobs.hosts import (
    HOST_NAME,
    Host,
    assign_slots,
    parse_host_list,
    parse_hostfile,
)
from chainermn_tools.jobs.job import JobOutput, capture_signals, run_job
from chainermn_tools.jobs.mpiexec import (
    HYDRA_VENDORS,
    find_launcher,
    find_mpiexec,
    mpiexec_command,
    mpiexec_path,
    parse_mpi_version,
    rank_command,
    threads_per_rank,
)
from chainermn_tools.jobs.process import (
    CompletedProcess,
    TimedOut,
    Unavailable,
    check_output,
    exit_on_signals,
    quote_output,
    run,
)
from chainermn_tools.jobs.supervisor import TERM_GRACE_SECONDS
from chainermn_tools.jobs.tags import (
    TAG_VARIABLE,
    kill_by_env_tag,
    kill_children_on_exit,
    register_tag,
)
from chainermn_tools.jobs.variables import (
    JOB_VARIABLE,
    influences_jobs,
    is_forwarded,
    rank_from_env,
)

__all__ = [
    "HOST_NAME",
    "HYDRA_VENDORS",
    "JOB_VARIABLE",
    "TAG_VARIABLE",
    "TERM_GRACE_SECONDS",
    "CompletedProcess",
    "Event",
    "Host",
    "JobOutput",
    "LostProcess",
    "TimedOut",
    "Unavailable",
    "assign_slots",
    "available_cores",
    "capture_signals",
    "check_output",
    "exit_on_signals",
    "find_launcher",
    "find_mpiexec",
    "influences_jobs",
    "is_forwarded",
    "kill_by_env_tag",
    "kill_children_on_exit",
    "mpiexec_command",
    "mpiexec_path",
    "parse_host_list",
    "parse_hostfile",
    "parse_mpi_version",
    "quote_output",
    "rank_command",
    "rank_from_env",
    "register_tag",
    "run",
    "run_job",
    "threads_per_rank",
]

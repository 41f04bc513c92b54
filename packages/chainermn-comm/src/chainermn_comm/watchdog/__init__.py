"""Reports which rank keeps the others waiting, and ends the job if asked.

A rank records each call in memory (`rank/`, `status_region`), which one process per
machine, the `monitor/`, maps and reads. The first machine's monitor decides for all. A
monitor imports only the standard library. See docs/decisions/failures.md.
"""

from .rank.connection import job_name as job_name
from .rank.recorder import count_update as count_update
from .rank.recorder import mark_aborting as mark_aborting
from .rank.recorder import mark_finalizing as mark_finalizing
from .rank.rendezvous import register as register
from .rank.rendezvous import watch_meeting as watch_meeting
from .timeout import SILENCE_VARIABLE as SILENCE_VARIABLE
from .timeout import TIMEOUT_VARIABLE as TIMEOUT_VARIABLE
from .timeout import Timeout as Timeout
from .timeout import timeout_from_env as timeout_from_env

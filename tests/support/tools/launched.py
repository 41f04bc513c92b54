"""How jobs end, for those that judge them."""

from chainermn_tools.jobs import Event, JobOutput
from chainermn_tools.jobs.events import find_lost

__all__ = ["Event", "JobOutput", "find_lost"]

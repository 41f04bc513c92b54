"""How jobs end, for those that judge them."""

from chainermn_tools.jobs import Event, JobOutput
from chainermn_tools.jobs.events import LostProcess

__all__ = ["Event", "JobOutput", "LostProcess"]

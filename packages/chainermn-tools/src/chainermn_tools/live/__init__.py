"""What a running job does, as its monitor on this host sees it."""

from chainermn_tools.live.running_jobs import ask as ask
from chainermn_tools.live.running_jobs import choose as choose
from chainermn_tools.live.window import activity as activity
from chainermn_tools.live.window import in_words as in_words
from chainermn_tools.live.window import summaries as summaries

"""What a bug report needs to say about this machine and what is installed on it."""

from chainermn_tools.environment.report import collect
from chainermn_tools.environment.text import render

__all__ = ["collect", "render"]

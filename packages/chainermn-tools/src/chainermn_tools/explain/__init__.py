"""Known failures of a cluster, and how they are found in a log."""

from chainermn_tools.explain.known import KNOWN, Kind, Known
from chainermn_tools.explain.search import Found, search
from chainermn_tools.explain.text import render

__all__ = ["KNOWN", "Found", "Kind", "Known", "render", "search"]

"""Known failures of a cluster, and how they are found in a log."""

from chainermn_tools.explain.rules import RULES, ErrorRule, Kind
from chainermn_tools.explain.search import Match, search
from chainermn_tools.explain.text import render

__all__ = ["RULES", "ErrorRule", "Kind", "Match", "render", "search"]

"""Known failures of a cluster, and how they are found in a log."""

from chainermn_tools.explain.error_rules import ErrorRule, Kind, load_rules
from chainermn_tools.explain.search import Match, root_cause, search
from chainermn_tools.explain.text import render

__all__ = ["ErrorRule", "Kind", "Match", "load_rules", "render", "root_cause", "search"]

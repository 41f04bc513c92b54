"""Known errors, which rank failed first, and how both are found in a log."""

from chainermn_tools.explain.error_rules import ErrorRule as ErrorRule
from chainermn_tools.explain.error_rules import Kind as Kind
from chainermn_tools.explain.error_rules import load_rules as load_rules
from chainermn_tools.explain.failed_rank import Verdict as Verdict
from chainermn_tools.explain.failed_rank import find_crash as find_crash
from chainermn_tools.explain.next_steps import LABEL as LABEL
from chainermn_tools.explain.next_steps import next_step as next_step
from chainermn_tools.explain.search import Findings as Findings
from chainermn_tools.explain.search import Match as Match
from chainermn_tools.explain.search import root_cause as root_cause
from chainermn_tools.explain.search import search as search
from chainermn_tools.explain.text import as_dict as as_dict
from chainermn_tools.explain.text import render as render

"""One HTML file that shows a job: learning curves, ranks' time lines, waiting, environment."""

from chainermn_tools.report.inputs import Inputs, NoReport, find
from chainermn_tools.report.page import write

__all__ = ["Inputs", "NoReport", "find", "write"]

"""Jobs of scripts: started, restarted after failures, and classified by their ranks' reports."""

from chainermn_tools.launch.restarts import run_script
from chainermn_tools.launch.verdict import JobResult, classify

__all__ = ["JobResult", "classify", "run_script"]

"""Jobs of scripts: started, restarted after failures, and classified by what their ranks report."""

from chainermn_tools.launch.classification import JobResult, classify
from chainermn_tools.launch.restarts import run_script

__all__ = ["JobResult", "classify", "run_script"]

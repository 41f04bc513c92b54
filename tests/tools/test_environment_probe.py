"""Questions that fail, hang or have no answer."""

import subprocess
import sys
import threading

from chainermn_tools.environment import probe
from tests.support.jobs.commands import environment
from tests.support.jobs.processes import is_gone, soon


def test_one_probe_that_fails_or_hangs_leaves_the_others():
    never = threading.Event()

    def has_no_answer():
        raise probe.Unavailable("there is none")

    asked = {"good": lambda: 1, "hangs": never.wait, "fails": lambda: 1 / 0}
    asked |= {"exits": lambda: sys.exit(3), "none": has_no_answer}
    found = probe.run_concurrently(asked, timeout=1)
    never.set()
    assert found.pop("good") == 1
    assert [(name, *said.items()) for name, said in found.items()] == [
        ("hangs", ("unavailable", "no answer within 1 s")),
        ("fails", ("unavailable", "ZeroDivisionError: division by zero")),
        ("exits", ("unavailable", "SystemExit: 3")),
        ("none", ("unavailable", "there is none")),
    ]


ASKED = """
import os, time
def ask():
    open("number", "w").write(str(os.getpid()))
    time.sleep(150)
"""
ASKS = """
from asked import ask
from chainermn_tools.environment.probe import call_in_subprocess
call_in_subprocess(ask, 140)
"""


def test_a_subprocess_ends_with_a_process_that_is_killed(tmp_path):
    """As mpiexec kills a rank, whose subprocess is in a session of its own."""
    (tmp_path / "asked.py").write_text(ASKED)
    number = tmp_path / "number"
    with subprocess.Popen(
        [sys.executable, "-c", ASKS],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(tmp_path)),
    ) as process:
        found = soon(lambda: number.exists() and number.read_text())
        process.kill()
    assert is_gone(int(found))

"""What CONTRIBUTING.md shows works as it stands, each in one file."""

import re
import sys

import pytest

from tests.support.jobs.commands import BIN, run
from tests.support.jobs.scripts import ROOT
from tests.support.tools.jobs import explained, rules_of

TEXT = (ROOT / "CONTRIBUTING.md").read_text()
# By the heading above each.
BLOCKS = dict(
    re.findall(
        r"^### ([^\n]*)\n(?:(?!^###).)*?```(?:python|toml)\n(.*?)```", TEXT, re.S | re.M
    )
)
RUN = """
import numpy as np
import added
from types import SimpleNamespace
from chainermn_comm import create_communicator

comm = create_communicator("NAME")
param = SimpleNamespace(data=np.zeros(5, "f4"), grad=np.full(5, comm.rank + 1, "f4"))
comm.allreduce_grad(SimpleNamespace(namedparams=lambda: [("/w", param)]))
print("mean " + str(param.grad.tolist()) + "\\n", end="")  # in one piece
"""


@pytest.mark.parametrize(
    ("heading", "name"), [("A communicator", "through_rank_0"), ("A sum", "plain")]
)
def test_a_file_makes_a_communicator(tmp_path, heading, name):
    (tmp_path / "added.py").write_text(BLOCKS[heading])
    (tmp_path / "script.py").write_text(RUN.replace("NAME", name))
    command = BIN / "mpiexec", "-n", 2, sys.executable, "script.py"
    done = run(*command, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("mean [1.5, 1.5, 1.5, 1.5, 1.5]") == 2


def test_a_function_is_an_operation_of_the_bench(tmp_path):
    (tmp_path / "added.py").write_text(BLOCKS["An operation of `chainermn bench`"])
    (tmp_path / "script.py").write_text(
        "import added\nfrom chainermn_tools.cli import main\nmain()\n"
    )
    options = "--communicator", "flat", "--max-size", "1K"
    command = BIN / "mpiexec", "-n", 2, sys.executable, "script.py", "bench", *options
    done = run(*command, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^gather +\d", done.stdout, re.M)
    assert "All values were right." in done.stdout


def test_a_function_is_a_check_and_a_rule_a_known_error():
    names = {}
    exec(BLOCKS["A check of the doctor"], names)
    assert names["nice"].run(None).status in ("ok", "warning")
    (rule,) = rules = rules_of(BLOCKS["A known error"])
    assert explained("\n".join(rule.examples), rules) == ["hyperspace-off"]


def test_folders_that_are_named_exist():
    folders = re.findall(r"^\| `([\w/-]+)`", TEXT, re.M)
    assert folders
    for folder in folders:
        assert (ROOT / folder).is_dir()

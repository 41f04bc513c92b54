"""What CONTRIBUTING.md shows works as it stands, each in one file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
# By the heading above each.
BLOCKS = dict(re.findall(r"^### (.*?)\n.*?```python\n(.*?)```", TEXT, re.S | re.M))
RUN = """
import numpy as np
import {module}
from types import SimpleNamespace
from chainermn_comm import create_communicator

comm = create_communicator("{name}")
param = SimpleNamespace(data=np.zeros(5, "f4"), grad=np.full(5, comm.rank + 1, "f4"))
comm.allreduce_grad(SimpleNamespace(namedparams=lambda: [("/w", param)]))
print("mean " + str(param.grad.tolist()) + "\\n", end="")  # in one piece
"""


@pytest.mark.parametrize(
    ("heading", "name"), [("A communicator", "through_rank_0"), ("A transport", "plain")]
)
def test_a_file_makes_a_communicator(tmp_path, heading, name):
    (tmp_path / "added.py").write_text(BLOCKS[heading])
    (tmp_path / "script.py").write_text(RUN.format(module="added", name=name))
    mpiexec = Path(sys.executable).parent / "mpiexec"
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("mean [1.5, 1.5, 1.5, 1.5, 1.5]") == 2


def test_a_function_is_a_check():
    names: dict[str, object] = {}
    exec(BLOCKS["A check of the doctor"], names)
    check = names["nice"]
    assert check.look(None).status in ("ok", "warning")  # type: ignore[attr-defined]


def test_a_row_is_a_known_error():
    names: dict[str, object] = {}
    exec(BLOCKS["A known error"].replace("\nKnown(", "\nrow = Known("), names)
    row = names["row"]
    assert all(any(sign in line for line in row.lines) for sign in row.signs)  # type: ignore[attr-defined]


def test_folders_and_commands_that_are_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in set(re.findall(r"make ([a-z-]+)", TEXT)):
        assert re.search(rf"^{command}:", makefile, re.M), command
    for folder in re.findall(r"^\| `([\w/-]+)`", TEXT, re.M):
        assert (ROOT / folder).is_dir()

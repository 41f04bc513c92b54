"""`chainermn env` as a user runs it: text, JSON, ranks, broken installations."""

import json
import sys
from importlib import metadata

import pytest

from tests.support.jobs import commands
from tests.support.jobs.commands import BIN, chainermn, program, run, with_program

SECTIONS = "python packages imports mpi machine blas gpus variables"
CUPY = """
from types import SimpleNamespace as N
one = {'name': b'H200', 'totalGlobalMem': 2**37, 'major': 9, 'minor': 0}
runtime = N(getDeviceCount=lambda: 2, getDeviceProperties=lambda n: one,
            driverGetVersion=lambda: 12080, runtimeGetVersion=lambda: 12040)
nccl = N(available=True, get_version=lambda: 22203)
"""


def report(**environment: str) -> dict:
    done = chainermn("env", "--json", **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def titles_of(text: str) -> str:
    return " ".join(line for line in text.splitlines() if line and line[0] != " ")


def test_json_holds_every_section_and_real_values():
    found = report(OMP_NUM_THREADS="1", SLURM_JWT="eyJ-secret", SLURM_JOB_ID="12")
    assert " ".join(found) == f"schema {SECTIONS}"
    assert found["schema"] == 3
    assert found["python"]["prefix"] == sys.prefix
    assert found["packages"]["numpy"] == metadata.version("numpy")
    assert found["imports"]["finder"] == "registered"
    assert found["mpi"]["mismatch"] is None
    assert found["machine"]["memory"]["total_bytes"] > 2**28
    assert "lo" in found["machine"]["interfaces"]
    shown = {"OMP_NUM_THREADS": "1", "SLURM_JWT": "(hidden)", "SLURM_JOB_ID": "12"}
    assert found["variables"].items() >= shown.items()
    # A probe that fails on every machine would be a bug; but GPUs may be missing.
    del found["gpus"]
    del found["variables"]
    assert '"unavailable":' not in json.dumps(found)


def test_text_without_a_terminal_is_plain_and_never_folds():
    long = "x" * 300
    done = chainermn(
        "env", CHAINERMN_SOMETHING=long, COLUMNS="20", TERM="xterm-256color"
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert long in done.stdout
    assert titles_of(done.stdout) == SECTIONS


def test_what_is_broken_leaves_the_rest(tmp_path):
    program(tmp_path / "numpy" / "__init__.py", "raise SystemExit(0)")
    program(tmp_path / "cupy" / "__init__.py", "raise ImportError('no CUDA here')")
    program(tmp_path / "mpi4py" / "__init__.py", "class rc: pass")
    program(tmp_path / "mpi4py" / "MPI.py", "import os; os.kill(os.getpid(), 11)")
    chainer = program(
        tmp_path / "chainer" / "__init__.py", "raise SystemExit('imported chainer')"
    )
    found = report(
        PYTHONPATH=str(tmp_path), PATH=str(tmp_path), CHAINERMN_NO_COMPAT="1"
    )
    assert "gave no answer" in found["blas"]["unavailable"]
    assert "no CUDA here" in found["gpus"]["cupy"]["unavailable"]
    assert "SIGSEGV" in found["mpi"]["library"]["unavailable"]
    no_launcher = found["mpi"]["launcher"]["unavailable"]
    assert no_launcher.startswith("no mpiexec on PATH")
    assert str(BIN / "mpiexec") in no_launcher
    assert found["imports"]["chainer"] == str(chainer)
    assert found["packages"]["mpi4py"]
    assert found["machine"]["host"]


def test_what_stands_in_for_others_is_reported(tmp_path):
    """An mpiexec of another MPI, CuPy, and variables of a launcher that is gone."""
    program(tmp_path / "cupy" / "cuda" / "__init__.py", CUPY)
    program(tmp_path / "cupy" / "__init__.py", "from . import cuda\n")
    text = "#!/bin/sh\necho Intel MPI Library, Version 2021.10\n"
    found = report(
        PATH=with_program(tmp_path, "mpiexec", text),
        PYTHONPATH=str(tmp_path),
        **{"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "99"},
        OMPI_COMM_WORLD_RANK="0",
    )
    assert str(tmp_path) in found["mpi"]["mismatch"]
    one = {"name": "H200", "memory_bytes": 2**37, "compute_capability": "9.0"}
    assert found["gpus"]["cupy"] == {"cuda": "12.4", "devices": [one, one]}
    assert found["gpus"]["nccl"] == "2.22.3"
    assert found["variables"]["PMI_FD"] == "99"


def test_under_mpiexec_rank_0_reports_all_ranks_once():
    done = run(BIN / "mpiexec", "-n", 3, *commands.MODULE, "env", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["topology"]
    assert found["size"] == 3
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]


@pytest.mark.full
def test_under_mpiexec_text_is_plain():
    """Open MPI gives each rank a terminal of its own."""
    done = run(BIN / "mpiexec", "-n", 2, *commands.MODULE, "env")
    assert "\x1b" not in done.stdout
    assert titles_of(done.stdout) == f"{SECTIONS} topology"


def test_a_rank_does_not_pay_for_the_report_nor_the_launcher():
    """`chainermn launch` starts each through this package."""
    code = (
        "import sys, chainermn_tools.rank\n"
        "print([name for name in sys.modules if name.startswith('chainermn_tools.')])\n"
        "from chainermn_tools import collect, render; print(collect.__name__, render.__name__)\n"
    )
    modules = ["long_events", "threads", "rank"]
    assert run(sys.executable, "-c", code).stdout.split("\n")[:2] == [
        str([f"chainermn_tools.{module}" for module in modules]),
        "collect render",
    ]

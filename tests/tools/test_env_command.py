"""`chainermn env` as a user runs it: text, JSON, terminals, broken installations."""

import json
import sys
from importlib import metadata

import pytest

from tests.support.jobs import commands
from tests.support.jobs.commands import BIN, chainermn, program, run, with_program
from tests.support.jobs.processes import is_gone

full = pytest.mark.full
SECTIONS = "python packages imports mpi machine blas gpus variables"


def report(**environment: str) -> dict:
    done = chainermn("env", "--json", **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    assert '"unavailable":' not in json.dumps(
        {**found, "gpus": None, "variables": None}
    )


def test_text_without_a_terminal_is_plain_and_never_folds():
    long = "x" * 300
    done = chainermn(
        "env", CHAINERMN_SOMETHING=long, COLUMNS="20", TERM="xterm-256color"
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert long in done.stdout
    assert titles_of(done.stdout) == SECTIONS


def titles_of(text: str) -> str:
    return " ".join(line for line in text.splitlines() if line and line[0] != " ")


def test_without_mpiexec_the_rest_is_reported(tmp_path):
    found = report(PATH=str(tmp_path))
    assert found["mpi"]["launcher"]["unavailable"].startswith("no mpiexec on PATH")
    assert str(BIN / "mpiexec") in found["mpi"]["launcher"]["unavailable"]
    assert found["mpi"]["library"]["vendor"]
    assert found["packages"]["numpy"]


@pytest.mark.ci
def test_an_mpiexec_that_hangs_ends_by_timeout_with_its_children(tmp_path):
    # The shell's child holds the output open, so ending the shell alone would not do.
    pids = tmp_path / "pids"
    text = f"#!/bin/sh\nsleep 10000 & echo $! >> {pids}\nwait\n"
    path = with_program(tmp_path, "mpiexec", text)
    code = (
        "import json; from chainermn_tools import collect; "
        "print(json.dumps(collect(seconds=10)))"
    )
    done = run(sys.executable, "-c", code, PATH=path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    late = "mpiexec did not end within 10 s"
    asked = f"{tmp_path / 'bin' / 'mpiexec'} --version"
    assert found["mpi"]["launcher"] == {"unavailable": f"{asked}: {late}"}
    assert found["packages"]["numpy"] == metadata.version("numpy")
    sleepers = [int(line) for line in pids.read_text().split()]
    assert len(sleepers) == 1
    assert all(map(is_gone, sleepers)), "a process outlived the command that started it"


def test_an_mpiexec_of_another_mpi_is_noticed(tmp_path):
    text = "#!/bin/sh\necho Intel MPI Library, Version 2021.10\n"
    found = report(PATH=with_program(tmp_path, "mpiexec", text))
    assert str(tmp_path) in found["mpi"]["mismatch"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        pytest.param("raise SystemExit(0)", "gave no answer", marks=full),
    ],
)
def test_a_crashing_mpi_import_leaves_the_rest(tmp_path, code, reason):
    program(tmp_path / "mpi4py" / "__init__.py", "class rc: pass\n")
    program(tmp_path / "mpi4py" / "MPI.py", code)
    found = report(PYTHONPATH=str(tmp_path))
    assert reason in found["mpi"]["library"]["unavailable"]
    assert found["mpi"]["launcher"]["version"]
    assert found["blas"]["numpy_built_with"]


def test_gpus_are_reported_through_cupy(tmp_path):
    """A stand-in for CuPy, since this must be tested without a GPU."""
    properties = "{'name': b'H200', 'totalGlobalMem': 2**37, 'major': 9, 'minor': 0}"
    program(
        tmp_path / "cupy" / "cuda" / "__init__.py",
        "from types import SimpleNamespace as N\n"
        f"runtime = N(getDeviceCount=lambda: 2, getDeviceProperties=lambda n: {properties},\n"
        "            driverGetVersion=lambda: 12080, runtimeGetVersion=lambda: 12040)\n"
        "nccl = N(available=True, get_version=lambda: 22203)\n",
    )
    program(tmp_path / "cupy" / "__init__.py", "from . import cuda\n")
    found = report(PYTHONPATH=str(tmp_path))["gpus"]
    one = {"name": "H200", "memory_bytes": 2**37, "compute_capability": "9.0"}
    assert found["cupy"] == {
        "cuda": "12.4",
        "devices": [one, one],
    }
    assert found["nccl"] == "2.22.3"


def test_a_broken_numpy_is_reported_and_chainer_not_imported(tmp_path):
    program(tmp_path / "numpy" / "__init__.py", "raise ImportError('no BLAS here')")
    chainer = program(
        tmp_path / "chainer" / "__init__.py", "raise SystemExit('imported chainer')"
    )
    found = report(PYTHONPATH=str(tmp_path), CHAINERMN_NO_COMPAT="1")
    assert found["imports"]["chainer"] == str(chainer)
    assert "no BLAS here" in found["blas"]["unavailable"]
    assert found["mpi"]["library"]["vendor"]
    assert found["machine"]["host"]


@pytest.mark.parametrize(
    "arguments", [("--json",), pytest.param((), marks=full)], ids=" ".join
)
def test_under_mpiexec_rank_0_reports_all_ranks_once(arguments):
    done = run(BIN / "mpiexec", "-n", 3, *commands.MODULE, "env", *arguments)
    assert done.returncode == 0, done.stderr
    if not arguments:
        assert "\x1b" not in done.stdout
        assert titles_of(done.stdout) == f"{SECTIONS} topology"
        return
    found = json.loads(done.stdout)["topology"]
    assert found["size"] == 3
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]


def test_a_launcher_that_is_gone_leaves_the_rest():
    """Its variables are inherited by all that starts from one of its ranks."""
    found = report(PMI_RANK="0", PMI_SIZE="2", PMI_FD="99", OMPI_COMM_WORLD_RANK="0")
    assert "unavailable" in found["topology"] or found["topology"]["size"] == 1
    assert found["mpi"]["library"]["vendor"]
    assert found["variables"]["PMI_FD"] == "99"


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

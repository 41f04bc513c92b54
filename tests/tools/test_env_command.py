"""`chainermn env` as a user runs it: text, JSON, terminals, broken installations."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import termios
import threading
from contextlib import suppress
from importlib import metadata

import pytest

from tests.support.commands import (
    BIN,
    MODULE,
    SECONDS,
    chainermn,
    environment,
    invoke,
    program,
    run,
    start,
    with_program,
)
from tests.support.processes import is_gone, soon

SECTIONS = [
    "python",
    "packages",
    "imports",
    "mpi",
    "topology",
    "machine",
    "blas",
    "gpus",
    "variables",
]


def report(**environment: str) -> dict:
    done = chainermn("env", "--json", **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def usual() -> dict:
    """The report of this environment as it is."""
    return report(OMP_NUM_THREADS="1", SLURM_JWT="eyJ-secret", SLURM_JOB_ID="12")


def test_json_holds_every_section_and_real_values(usual):
    found = usual
    assert list(found) == ["schema", *SECTIONS]
    assert found["schema"] == 1
    assert found["python"]["version"] == sys.version.split()[0]
    assert found["packages"]["numpy"] == metadata.version("numpy")
    assert found["packages"]["chainermn-comm"] == metadata.version("chainermn-comm")
    assert found["mpi"]["library"]["vendor"] == found["mpi"]["launcher"]["vendor"]
    assert found["mpi"]["match"] is True
    assert found["topology"]["size"] == 2
    assert [rank["rank"] for rank in found["topology"]["ranks"]] == [0, 1]
    assert found["machine"]["cores"]["usable"] <= len(os.sched_getaffinity(0))
    assert found["machine"]["memory"]["total_bytes"] > 2**28
    assert found["variables"]["OMP_NUM_THREADS"] == "1"
    assert found["mpi"]["mpicc"] == str(BIN / "mpicc")
    assert found["topology"]["thread level"] == "multiple"
    assert found["topology"]["CUDA-aware MPI"] is False  # both wheels are built without CUDA
    assert found["machine"]["limits"]["open files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert "lo" in found["machine"]["interfaces"]
    assert found["python"]["prefix"] == sys.prefix
    assert found["packages"]["rich"] == metadata.version("rich")


def test_json_says_unavailable_only_for_what_this_machine_lacks(usual):
    """A probe that fails on every machine would be a bug; GPUs may be missing."""
    lacking = [
        path for path, value in leaves(usual) if isinstance(value, dict) and path[0] != "gpus"
    ]
    assert lacking == []


def leaves(value, path=()):
    """Every part of the report that holds no other, "unavailable" ones as their dict."""
    if isinstance(value, dict) and "unavailable" not in value:
        for name, inner in value.items():
            yield from leaves(inner, (*path, name))
    else:
        yield path, value


def test_startup_finder_is_found_registered(usual):
    found = usual["imports"]
    assert found["finder"] == "registered"
    assert "chainermn_facade" in found["chainermn"]
    assert found["_chainermn_startup"].endswith("_chainermn_startup.py")


def test_text_without_a_terminal_is_plain_and_never_folds():
    long = "x" * 300
    done = chainermn("env", CHAINERMN_SOMETHING=long, COLUMNS="20", TERM="xterm-256color")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert long in done.stdout
    titles = [line for line in done.stdout.splitlines() if line and not line.startswith(" ")]
    assert titles == SECTIONS


def test_text_on_a_narrow_terminal_keeps_to_its_width():
    columns = 30
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = environment(TERM="xterm")
    for name in ("COLUMNS", "NO_COLOR"):
        variables.pop(name, None)
    with start("env", stdout=slave, stdin=slave, env=variables) as process:
        os.close(slave)
        end = threading.Timer(SECONDS, process.kill)
        end.start()
        text = b""
        with suppress(OSError):  # how a terminal says that nobody writes to it any more
            while piece := os.read(master, 4096):
                text += piece
        assert process.wait(SECONDS) == 0
        end.cancel()
    os.close(master)
    assert b"\x1b[1m" in text  # bold titles
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text.decode()).splitlines()
    assert set(SECTIONS) <= {line.strip() for line in lines}
    assert max(len(line.rstrip()) for line in lines) <= columns


def test_without_mpiexec_the_rest_is_reported(tmp_path):
    found = report(PATH=str(tmp_path))
    assert found["mpi"]["launcher"]["unavailable"].startswith("no mpiexec on PATH")
    assert str(BIN / "mpiexec") in found["mpi"]["launcher"]["unavailable"]
    assert "unavailable" in found["topology"]
    assert "unavailable" in found["mpi"]["match"]
    assert found["mpi"]["library"]["vendor"]
    assert found["packages"]["numpy"]


def test_an_mpiexec_that_hangs_ends_by_timeout_with_its_children(tmp_path):
    # The shell's child holds the output open, so ending the shell alone would not do.
    pids = tmp_path / "pids"
    text = f"#!/bin/sh\nsleep 10000 & echo $! >> {pids}\nwait\n"
    path = with_program(tmp_path, "mpiexec", text)
    code = "import json; from chainermn_tools import collect; print(json.dumps(collect(seconds=2)))"
    done = run(sys.executable, "-c", code, PATH=path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    late = "mpiexec did not end within 2 s"
    assert found["topology"] == {"unavailable": late}
    asked = f"{tmp_path / 'bin' / 'mpiexec'} --version"
    assert found["mpi"]["launcher"] == {"unavailable": f"{asked}: {late}"}
    assert found["packages"]["numpy"] == metadata.version("numpy")
    sleepers = [int(line) for line in pids.read_text().split()]
    assert len(sleepers) == 2
    for pid in sleepers:
        assert is_gone(pid), f"process {pid} outlived the command that started it"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_a_signal_ends_all_that_was_started(tmp_path, number):
    pids = tmp_path / "pids"
    text = f"#!/bin/sh\necho $$ >> {pids}\nexec sleep 10000\n"
    path = with_program(tmp_path, "mpiexec", text)
    process = start("env", stdout=subprocess.PIPE, env=environment(PATH=path))
    assert soon(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (128 + number, "")
    for pid in pids.read_text().split():
        assert is_gone(int(pid))


def test_an_mpiexec_that_fails_is_quoted(tmp_path):
    text = "#!/bin/sh\necho no licence found >&2\nexit 7\n"
    found = report(PATH=with_program(tmp_path, "mpiexec", text))
    reason = "mpiexec ended with exit code 7: no licence found"
    asked = f"{tmp_path / 'bin' / 'mpiexec'} --version"
    assert found["mpi"]["launcher"] == {"unavailable": f"{asked}: {reason}"}
    assert found["topology"] == {"unavailable": reason}


def test_an_mpiexec_of_another_mpi_is_noticed(tmp_path, usual):
    other = "mpiexec (Open MPI) 5.0.11"
    if usual["mpi"]["library"]["vendor"] == "Open MPI":
        other = "HYDRA build details: Version: 4.2.0"
    path = with_program(tmp_path, "mpiexec", f"#!/bin/sh\necho '{other}'\n")
    found = report(PATH=path)
    assert found["mpi"]["match"] is False
    assert str(tmp_path) in found["mpi"]["mismatch"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        pytest.param(
            *("raise ImportError('libmpi.so.12: cannot open')", "libmpi.so.12: cannot open"),
            marks=pytest.mark.full,
        ),
        pytest.param("raise SystemExit(0)", "gave no answer", marks=pytest.mark.full),
    ],
)
def test_a_crashing_mpi_import_leaves_the_rest(tmp_path, code, reason):
    program(tmp_path / "mpi4py" / "__init__.py", "class rc: pass\n")
    program(tmp_path / "mpi4py" / "MPI.py", code)
    found = report(PYTHONPATH=str(tmp_path))
    assert reason in found["mpi"]["library"]["unavailable"]
    assert "unavailable" in found["topology"]
    assert found["mpi"]["launcher"]["version"]
    assert found["blas"]["numpy built with"]


def test_a_broken_numpy_is_reported(tmp_path):
    program(tmp_path / "numpy" / "__init__.py", "raise ImportError('no BLAS here')")
    found = report(PYTHONPATH=str(tmp_path))
    assert "no BLAS here" in found["blas"]["unavailable"]
    assert found["mpi"]["library"]["vendor"]


def test_gpus_are_reported_through_cupy(tmp_path):
    """A stand-in for CuPy, since this must be tested without a GPU."""
    properties = "{'name': b'H200', 'totalGlobalMem': 2**37, 'major': 9, 'minor': 0}"
    program(
        tmp_path / "cupy" / "__init__.py",
        "from types import SimpleNamespace as N\n"
        f"runtime = N(getDeviceCount=lambda: 2, getDeviceProperties=lambda n: {properties},\n"
        "            driverGetVersion=lambda: 12080, runtimeGetVersion=lambda: 12040)\n"
        "from . import cuda\ncuda.runtime = runtime\n",
    )
    nccl = "available = True\ndef get_version(): return 22203\n"
    program(tmp_path / "cupy" / "cuda" / "__init__.py", "")
    program(tmp_path / "cupy" / "cuda" / "nccl.py", nccl)
    found = report(PYTHONPATH=str(tmp_path))["gpus"]
    one = {"name": "H200", "memory_bytes": 2**37, "compute capability": "9.0"}
    assert found["cupy"] == {"driver's cuda": "12.8", "cuda": "12.4", "devices": [one, one]}
    assert found["nccl"] == "2.22.3"


def test_chainer_is_not_imported(tmp_path):
    program(tmp_path / "chainer" / "__init__.py", "raise SystemExit('imported chainer')")
    found = report(PYTHONPATH=str(tmp_path), CHAINERMN_NO_COMPAT="1")
    assert found["imports"]["chainer"] == str(tmp_path / "chainer" / "__init__.py")
    assert found["machine"]["host"]


def test_the_current_folder_is_not_imported_from(tmp_path, monkeypatch):
    program(tmp_path / "numpy.py", "raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    assert report()["blas"]["numpy built with"]


def test_secrets_are_hidden(usual):
    found = usual["variables"]
    assert found["SLURM_JWT"] == "(hidden)"
    assert found["SLURM_JOB_ID"] == "12"


@pytest.mark.parametrize(
    "arguments", [("--json",), pytest.param((), marks=pytest.mark.full)], ids=" ".join
)
def test_under_mpiexec_rank_0_reports_all_ranks_once(arguments):
    done = run(BIN / "mpiexec", "-n", 3, *MODULE, "env", *arguments)
    assert done.returncode == 0, done.stderr
    if not arguments:
        assert "\x1b" not in done.stdout
        titles = [line for line in done.stdout.splitlines() if line and line[0] != " "]
        assert titles == SECTIONS
        return
    found = json.loads(done.stdout)["topology"]
    assert found["started"] == "by the launcher"
    assert found["size"] == 3
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]


def test_a_launcher_that_is_gone_leaves_the_rest():
    """Its variables are inherited by all that starts from one of its ranks."""
    found = report(PMI_RANK="0", PMI_SIZE="2", PMI_FD="99", OMPI_COMM_WORLD_RANK="0")
    assert "unavailable" in found["topology"] or found["topology"]["size"] == 1
    assert found["mpi"]["library"]["vendor"]
    assert found["variables"]["PMI_FD"] == "99"


def test_version_and_help():
    """Of the program that is installed, which the module is, too."""
    said = run(BIN / "chainermn", "--version").stdout.split()
    assert said == ["chainermn-tools", metadata.version("chainermn-tools")]
    assert "env" in invoke("--help").output
    assert "--json" in invoke("env", "--help").output
    assert invoke("nonsense").exit_code == 2

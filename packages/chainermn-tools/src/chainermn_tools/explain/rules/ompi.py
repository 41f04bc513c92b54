"""Failures that Open MPI and its launchers (ORTE up to 4, PRRTE from 5 on) report."""

import re

from chainermn_tools.explain.rules.rule import ErrorRule, Kind

OMPI = "Open MPI"
LAUNCHER = "Open MPI's mpiexec"

RULES = (
    ErrorRule(
        name="ompi-not-enough-slots",
        kind=Kind.ROOT_CAUSE,
        component=LAUNCHER,
        literals=("There are not enough slots available in the system",),
        examples=(
            "There are not enough slots available in the system to satisfy the 200",
            "slots that were requested by the application:",
        ),
        meaning="More ranks were asked for than Open MPI counts slots: one for each core, or one "
        "for each host that is named without a number.",
        fix=(
            "chainermn launch -n 4 train.py   # asks for what is needed",
            "mpiexec --map-by :OVERSUBSCRIBE -n 4 python train.py   # more ranks than cores",
            "mpiexec -n 4 --host host0:2,host1:2 python train.py   # hostfile: host0 slots=2",
        ),
        source="Open MPI 5.0.11, run; inducer/grudge#227; open-mpi/ompi#10216",
    ),
    ErrorRule(
        name="ompi-refuses-root",
        kind=Kind.ROOT_CAUSE,
        component=LAUNCHER,
        literals=("has detected an attempt to run as root",),
        examples=("prterun has detected an attempt to run as root.",),
        meaning="Open MPI's launcher refuses to run as root, usual in containers, unless told.",
        fix=(
            "run it as an ordinary user",
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1   # in a container",
        ),
        source="Open MPI 5.0.11, run; open-mpi/ompi#7704",
    ),
    ErrorRule(
        name="ompi-cma-forbidden",
        kind=Kind.ROOT_CAUSE,
        component="Open MPI, shared memory",
        literals=("Read -1, expected ",),
        pattern=re.compile(r"Read -1, expected \d+, errno = ?1\b"),
        examples=("[host0:00040] Read -1, expected 131072, errno = 1",),
        meaning="The kernel refuses to let a rank read another one's memory (process_vm_readv), "
        "usual in containers.",
        fix=(
            "Open MPI 5: export OMPI_MCA_smsc=^cma",
            "Open MPI 4: export OMPI_MCA_btl_vader_single_copy_mechanism=none",
            "or allow it: docker run --cap-add=SYS_PTRACE ...",
        ),
        source="horovod/horovod docs/docker.rst; open-mpi/ompi#4948; open-mpi/ompi#3270",
    ),
    ErrorRule(
        name="ompi-opal-init-failed",
        kind=Kind.ROOT_CAUSE,
        component=OMPI,
        literals=("It looks like opal_init failed for some reason",),
        examples=(
            "It looks like opal_init failed for some reason; your parallel process is",
            "likely to abort.  There are many reasons that a parallel process can",
            "  opal_shmem_base_select failed",
            "  --> Returned value -1 instead of OPAL_SUCCESS",
        ),
        meaning="Open MPI's library could not load its own plug-ins: mostly files of two "
        "installations are mixed.",
        fix=(
            "env | grep -E '^(OPAL|OMPI|PRTE|PMIX)_|LD_LIBRARY_PATH'   # of another installation?",
            "type -a mpiexec; chainermn env   # keep one Open MPI only",
        ),
        source="mpi4py/mpi4py#249; open-mpi/ompi#4499; open-mpi/ompi#3698",
    ),
    ErrorRule(
        name="ompi-orte-init-failed",
        kind=Kind.ROOT_CAUSE,
        component="Open MPI 4",
        literals=("It looks like orte_init failed for some reason",),
        examples=(
            "It looks like orte_init failed for some reason; your parallel process is",
            "  orte_ess_init failed",
            "  --> Returned value Unable to start a daemon on the local node (-127) instead of "
            "ORTE_SUCCESS",
        ),
        meaning="Open MPI's run-time did not start: its daemon, orted, is not beside the library "
        "in use, mostly because another Open MPI is first on PATH.",
        fix=(
            "type -a mpiexec orted   # both must come from one installation",
            "mpiexec -n 1 python train.py   # instead of: python train.py",
        ),
        source="JohannesBuchner/PyMultiNest#158; illinois-scicomp/machine-shop-maintenance#79",
    ),
    ErrorRule(
        name="ompi-daemon-not-on-path",
        kind=Kind.ROOT_CAUSE,
        component="ssh, for Open MPI's mpiexec",
        literals=("orted: ", "prted: "),
        pattern=re.compile(
            r"\b(?:orted|prted): (?:(?:command )?not found|No such file or directory)"
        ),
        examples=("bash: orted: command not found", "bash: line 1: prted: command not found"),
        meaning="The shell that ssh opens on the other host doesn't find Open MPI's daemon: PATH "
        "lacks it there, or that host has another series (orted is 4's, prted 5's).",
        fix=(
            "mpiexec --prefix /opt/openmpi ...   # or call mpiexec by its full path",
            "set PATH in ~/.bashrc before the line that leaves non-interactive shells",
        ),
        source="open-mpi/ompi#599; open-mpi/ompi#8870; openpmix/prrte#371",
    ),
    ErrorRule(
        name="ompi-daemons-not-started",
        kind=Kind.SECONDARY,
        component=LAUNCHER,
        literals=("unable to reliably start one or more daemons",),
        examples=(
            "ORTE was unable to reliably start one or more daemons.",
            "prterun was unable to reliably start one or more daemons.",
        ),
        meaning="mpiexec could not start its daemon on another host.",
        fix=(
            "the line just above, of ssh or a shell, says why",
            "ssh -o BatchMode=yes host1 'which orted prted; echo $LD_LIBRARY_PATH'",
        ),
        source="openpmix/prrte#1493; horovod/horovod#527",
    ),
    ErrorRule(
        name="ompi-daemon-did-not-report",
        kind=Kind.AMBIGUOUS,
        component=LAUNCHER,
        literals=("A daemon failed to report back after being spawned.",),
        examples=(
            "A daemon failed to report back after being spawned. This could",
            "  Remote host:   host1",
            "  Daemon exit status: 255",
        ),
        meaning="The daemon on another host was not started, or can't connect back to mpiexec.",
        fix=(
            "status 255: ssh failed; ssh -o BatchMode=yes host1 true   # must be silent",
            "127: no Open MPI on PATH there; mpiexec --prefix /opt/openmpi ...",
            "else a firewall: the hosts must reach each other on all ports",
        ),
        source="Open MPI 5.0.11, run with a host that doesn't exist",
    ),
    ErrorRule(
        name="prrte-versions-differ",
        kind=Kind.ROOT_CAUSE,
        component=LAUNCHER,
        literals=("PRTE detected a mismatch in versions between two processes",),
        examples=("PRTE detected a mismatch in versions between two processes.  This",),
        meaning="The hosts have different releases of Open MPI's launcher.",
        fix=(
            "ssh host1 'type mpiexec; mpiexec --version'   # compare with each host",
            "install one and the same Open MPI on every host",
        ),
        source="help texts of Open MPI 5.0.11; open-mpi/ompi#13093",
    ),
    ErrorRule(
        name="pmix-versions-differ",
        kind=Kind.ROOT_CAUSE,
        component="PMIx (in Open MPI, Slurm)",
        literals=("PMIX ERROR: UNPACK-",),
        examples=(
            "[host0:11663] PMIX ERROR: UNPACK-PAST-END in file unpack.c at line 206",
            "[host0:11663] PMIX ERROR: UNPACK-PAST-END in file client/pmix_client.c at line 228",
            "*** An error occurred in MPI_Init",
        ),
        meaning="The launcher and the program's MPI library speak different PMIx: mpiexec is of "
        "one Open MPI and the library of another (host and container, conda and system).",
        fix=(
            "chainermn env   # shows mpiexec and the library",
            "start with the mpiexec of the library's own installation",
        ),
        source="open-mpi/ompi#5535; openpmix/openpmix#556",
    ),
    ErrorRule(
        name="ompi-no-pml",
        kind=Kind.ROOT_CAUSE,
        component=OMPI,
        literals=("No components were able to be opened in the pml framework",),
        examples=(
            "No components were able to be opened in the pml framework.",
            "  Framework: pml",
            "[host0:232067] PML ob1 cannot be selected",
        ),
        meaning="No point-to-point layer is left: the one asked for, often ucx, doesn't work with "
        "this hardware or thread level, or lacks a library.",
        fix=(
            "env | grep OMPI_MCA; ompi_info | grep 'MCA pml'",
            "mpiexec --mca pml ob1 --mca btl self,sm,tcp ...   # Open MPI 4: self,vader,tcp",
        ),
        source="3dem/relion#344; open-mpi/ompi#9838; open-mpi/ompi#7503",
    ),
    ErrorRule(
        name="ompi4-openib",
        kind=Kind.WARNING,
        component="Open MPI 4",
        literals=(
            "By default, for Open MPI 4.0 and later, infiniband ports on a device",
            "No preset parameters were found for the device that Open MPI",
        ),
        examples=(
            "By default, for Open MPI 4.0 and later, infiniband ports on a device",
            "are not used by default.  The intent is to use UCX for these devices.",
            "WARNING: There was an error initializing an OpenFabrics device.",
            "WARNING: No preset parameters were found for the device that Open MPI",
        ),
        meaning="The old InfiniBand transport, openib, stands aside; where Open MPI was built "
        "without UCX, messages then go over TCP, which is slow.",
        fix=(
            "ompi_info | grep 'MCA pml: ucx'   # there must be such a line",
            "export OMPI_MCA_btl=^openib   # silences it",
        ),
        source="parthenon-hpc-lab/parthenon#237; Open MPI 4's help texts",
    ),
    ErrorRule(
        name="ompi-forked",
        kind=Kind.WARNING,
        component=OMPI,
        literals=('"fork()" system call to create a child process.',),
        examples=(
            "A process has executed an operation involving a call to the",
            '"fork()" system call to create a child process.  Open MPI is currently',
            "operating in a condition that could result in memory corruption or",
        ),
        meaning="A rank forked (a data loader, subprocess) after MPI started, on a network whose "
        "registered memory doesn't survive that: crashes may follow.",
        fix=(
            "multiprocessing.set_start_method('forkserver')   # first thing, before MPI starts",
            "on plain TCP it is harmless: export OMPI_MCA_mpi_warn_on_fork=0",
        ),
        source="NVIDIA/nccl#65; wtsi-ssg/pcp#16; help texts of Open MPI 5.0.11",
    ),
    ErrorRule(
        name="ompi-tcp-connect-failed",
        kind=Kind.ROOT_CAUSE,
        component="Open MPI, TCP",
        literals=("Open MPI failed to TCP connect to a peer", "mca_btl_tcp_endpoint_"),
        pattern=re.compile(
            r"mca_btl_tcp_endpoint_\w+\] connect\(\) to .* failed|failed to TCP connect to a peer"
        ),
        examples=(
            "[host0][[463,1],0][btl_tcp_endpoint.c:803:mca_btl_tcp_endpoint_complete_connect] "
            "connect() to 10.102.1.194 failed: No route to host (113)",
            "WARNING: Open MPI failed to TCP connect to a peer MPI process.  This",
        ),
        meaning="A rank tried an address that it can't reach: of a virtual interface (docker0, "
        "virbr0), of a second network, or behind a firewall.",
        fix=(
            "export OMPI_MCA_btl_tcp_if_include=192.0.2.0/24   # the network that the hosts share",
            "or export OMPI_MCA_btl_tcp_if_exclude=lo,docker0,virbr0",
        ),
        source="open-mpi/ompi#2168; open-mpi/ompi#4963; open-mpi/ompi#6377",
    ),
    ErrorRule(
        name="ompi-srun-without-pmi",
        kind=Kind.ROOT_CAUSE,
        component="Open MPI under Slurm",
        literals=(
            "OMPI was not built with SLURM's PMI support",
            "OMPI was not built with SLURM support",
        ),
        examples=(
            'The application appears to have been direct launched using "srun",',
            "but OMPI was not built with SLURM's PMI support and therefore cannot",
            "but OMPI was not built with SLURM support. This usually happens",
        ),
        meaning="srun started the ranks, and it shares no PMI with this Open MPI.",
        fix=(
            "srun --mpi=list; srun --mpi=pmix -n 4 python train.py",
            "salloc -n 4 mpiexec -n 4 python train.py   # mpiexec inside the allocation",
        ),
        source="mpi4py/mpi4py#141; open-mpi/ompi#3778; help texts of Open MPI 5.0.11",
    ),
    ErrorRule(
        name="ompi-shared-memory-failed",
        kind=Kind.ROOT_CAUSE,
        component="Open MPI, shared memory",
        literals=("A system call failed during shared memory initialization that should",),
        examples=(
            "A system call failed during shared memory initialization that should",
            "not have.  It is likely that your MPI job will now either abort or",
            "  System call: open(2) ",
            "  Error:       Permission denied (errno 13)",
        ),
        meaning="The file for messages inside the host could not be made: one of another user or "
        "job is in the way, or /dev/shm or the temporary folder is full or not writable.",
        fix=(
            "df -h /dev/shm /tmp; ls -l /dev/shm   # *_segment.* of no running job: remove them",
            "export TMPDIR=/tmp   # a local folder that you may write to",
        ),
        source="open-mpi/ompi#7308; open-mpi/ompi#6518; help texts of Open MPI 5.0.11",
    ),
    ErrorRule(
        name="ompi-no-executable",
        kind=Kind.ROOT_CAUSE,
        component=LAUNCHER,
        literals=("unable to launch the specified application as it could not",),
        examples=(
            "prterun was unable to launch the specified application as it could not",
            "access an executable:",
            "   Executable: ./train",
        ),
        meaning="The program is not there, or can't be executed, on the host that is named.",
        fix=(
            "name the interpreter: mpiexec -n 2 python train.py",
            "on several hosts: the same Python and the same script at the same path everywhere",
        ),
        source="Open MPI 5.0.11, run",
    ),
    ErrorRule(
        name="ompi-rank-failed",
        kind=Kind.SECONDARY,
        component=LAUNCHER,
        literals=(
            "detected that one or more processes exited with non-zero status",
            "has exited due to process rank",
        ),
        examples=(
            "prterun detected that one or more processes exited with non-zero status,",
            "thus causing the job to be terminated. The first process to do so was:",
            "   Process name: [prterun-host0-21834@1,1]",
            "   Exit code:    5",
            "prterun has exited due to process rank 1 with PID 0 on node host0 calling",
        ),
        meaning="A rank, which the text names, ended with a failure.",
        fix=("that rank said why before: read its traceback",),
        source="Open MPI 5.0.11, run",
    ),
)

"""Failures of what carries messages and starts ranks on other hosts: UCX, libfabric, ssh, Slurm."""

import re

from chainermn_tools.explain.rules.rule import ErrorRule, Kind

RULES = (
    ErrorRule(
        name="ucx-cma-forbidden",
        kind=Kind.ROOT_CAUSE,
        component="UCX",
        literals=("cma_ep.c:",),
        pattern=re.compile(r"cma_ep\.c:\d+\s.*process_vm_\w+\(.*Operation not permitted"),
        examples=(
            "[host0:3549626:0:3549626]      cma_ep.c:84   process_vm_readv(pid=3549634 "
            "{0x24ed520,12480}-->{0x1bd42a0,12480}) returned -1: Operation not permitted",
        ),
        meaning="The kernel refuses to let a rank read another one's memory (process_vm_readv): "
        "a container's seccomp profile, or Yama's ptrace_scope.",
        fix=(
            "export UCX_TLS=^cma",
            "or allow it: docker run --cap-add=SYS_PTRACE ...",
        ),
        source="openucx/ucx#8958; openucx/ucx#3545",
    ),
    ErrorRule(
        name="ucx-single-threaded",
        kind=Kind.ROOT_CAUSE,
        component="UCX under Open MPI",
        literals=("UCP worker does not support MPI_THREAD_MULTIPLE",),
        examples=(
            "[host0:14245] pml_ucx.c:285  Error: UCP worker does not support MPI_THREAD_MULTIPLE",
        ),
        meaning="mpi4py asks for MPI_THREAD_MULTIPLE, and this UCX was built without threads.",
        fix=(
            "export MPI4PY_RC_THREAD_LEVEL=serialized",
            "or another way for messages: export OMPI_MCA_pml=ob1",
        ),
        source="open-mpi/ompi#7768; open-mpi/ompi#6171; open-mpi/ompi#6593",
    ),
    ErrorRule(
        name="ucx-gpu-pointer",
        kind=Kind.ROOT_CAUSE,
        component="UCX",
        literals=("(Segmentation fault: invalid permissions for mapped object",),
        examples=(
            "[host0:75456:0:75456] Caught signal 11 (Segmentation fault: invalid permissions for "
            "mapped object at address 0x7fa7139fd080)",
        ),
        meaning="A CPU read GPU memory: it was given to an MPI or UCX that is not CUDA-aware.",
        fix=(
            "use a ChainerMN communicator, which stages GPU arrays where MPI is not CUDA-aware",
            "in your own MPI calls: cupy.asnumpy(array) first; `chainermn env` shows the MPI",
        ),
        source="idefix-code/idefix#12; parthenon-hpc-lab/parthenon#237",
    ),
    ErrorRule(
        name="locked-memory-limit",
        kind=Kind.ROOT_CAUSE,
        component="InfiniBand (libibverbs)",
        literals=("ibv_reg_mr",),
        pattern=re.compile(
            r"ibv_reg_mr\w*(?:\([^)]*\))? failed(?: with error|:) Cannot allocate memory"
        ),
        examples=(
            "misc/ibvwrap.cc:278 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot "
            "allocate memory",
            "UCX ERROR ibv_reg_mr failed: Cannot allocate memory",
        ),
        meaning="InfiniBand locks its buffers in memory, and the job may lock too little.",
        fix=(
            "mpiexec -n 1 bash -c 'ulimit -l'   # must say unlimited, on every host",
            "docker run --ulimit memlock=-1 ...; else memlock in /etc/security/limits.conf",
        ),
        source="NVIDIA/nccl-tests#206; openucx/ucx#6264",
    ),
    ErrorRule(
        name="efa-forked",
        kind=Kind.ROOT_CAUSE,
        component="libfabric (EFA), met through MPICH",
        literals=("the libfabric EFA provider is operating in",),
        examples=(
            "As a result, the libfabric EFA provider is operating in",
            "a condition that could result in memory corruption or",
            "          RDMAV_FORK_SAFE",
            "Your job will now abort.",
        ),
        meaning="A rank forked while libfabric's EFA provider was loaded, which ends the job.",
        fix=(
            "export FI_PROVIDER=tcp   # where there is no EFA hardware",
            "export RDMAV_FORK_SAFE=1   # where there is",
            "multiprocessing.set_start_method('forkserver')   # first thing, before MPI starts",
        ),
        source="numba-mpi/numba-mpi#69; jeffhammond/mukautuva#3",
    ),
    ErrorRule(
        name="ssh-unknown-host",
        kind=Kind.ROOT_CAUSE,
        component="ssh",
        literals=("ssh: Could not resolve hostname",),
        examples=("ssh: Could not resolve hostname host1: Name or service not known",),
        meaning="A host was named that this one doesn't know.",
        fix=(
            "getent hosts host1   # must print an address",
            "mend the name in --hosts or the hostfile, or add it to /etc/hosts",
        ),
        source="MPICH 5.0.2 and Open MPI 5.0.11, run with a host that doesn't exist",
    ),
    ErrorRule(
        name="ssh-cannot-connect",
        kind=Kind.ROOT_CAUSE,
        component="ssh",
        literals=("ssh: connect to host ",),
        examples=("ssh: connect to host host1 port 22: Connection refused",),
        meaning="No ssh server answers there: none runs, it listens on another port, or a "
        "firewall is between.",
        fix=(
            "ssh host1 true   # must work without a word",
            "another port goes into ~/.ssh/config: Host host1, then Port 2222",
        ),
        source="OpenSSH, run",
    ),
    ErrorRule(
        name="ssh-host-key",
        kind=Kind.ROOT_CAUSE,
        component="ssh",
        literals=("Host key verification failed",),
        examples=("Host key verification failed.",),
        meaning="The other host's key is unknown or has changed, and a launcher can't be asked.",
        fix=(
            "ssh host1 true   # once by hand, and compare the key that it shows",
            "if the host was really installed anew: ssh-keygen -R host1, first",
        ),
        source="microsoft/VirtualClient#752; pmodels/mpich#4712; kftsehk/phy-clusters#29",
    ),
    ErrorRule(
        name="ssh-permission-denied",
        kind=Kind.ROOT_CAUSE,
        component="ssh",
        literals=("Permission denied (publickey",),
        examples=("user@host1: Permission denied (publickey,password).",),
        meaning="The other host takes no key of this user, and a launcher can't type a password.",
        fix=(
            "ssh-copy-id host1   # with no key yet: ssh-keygen -t ed25519, first",
            "ssh -o BatchMode=yes host1 true   # must be silent",
        ),
        source="horovod/horovod#467",
    ),
    ErrorRule(
        name="slurm-no-such-mpi",
        kind=Kind.ROOT_CAUSE,
        component="Slurm",
        literals=("srun: error: ",),
        pattern=re.compile(
            r"srun: error: (?:Couldn't (?:find|load) (?:the )?specified plugin name for mpi/"
            r"|cannot find mpi plugin for mpi/|Invalid MPI type)"
        ),
        examples=(
            "srun: error: Couldn't find the specified plugin name for mpi/pmix looking at all "
            "files",
            "srun: error: cannot find mpi plugin for mpi/pmix",
            "srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types",
        ),
        meaning="This Slurm has no plug-in of the kind that srun --mpi names.",
        fix=(
            "srun --mpi=list",
            "srun --mpi=pmi2 -n 4 python train.py   # MPICH, MVAPICH",
            "or mpiexec inside the allocation: salloc -n 4 mpiexec -n 4 python train.py",
        ),
        source="geoschem/geos-chem#822; pyiron/executorlib#761",
    ),
    ErrorRule(
        name="slurm-out-of-memory",
        kind=Kind.ROOT_CAUSE,
        component="Slurm",
        literals=("slurmstepd: error: Detected ",),
        pattern=re.compile(r"slurmstepd: error: Detected \d+ oom[-_]kill event"),
        examples=(
            "slurmstepd: error: Detected 1 oom-kill event(s) in step 3495064.0 cgroup. Some of "
            "your processes may have been killed by the cgroup out-of-memory handler.",
            "slurmstepd: error: Detected 1 oom_kill event in StepId=11300781.0. Some of the step "
            "tasks have been OOM Killed.",
            "srun: error: host0: task 4: Out Of Memory",
        ),
        meaning="The job used more memory than Slurm granted it.",
        fix=(
            "sbatch --mem-per-cpu=8G ...   # or --mem=0, a whole node's",
            "sacct -j JOBID --format=JobID,MaxRSS,ReqMem,State",
            "chainermn.scatter_dataset: NumPy data are held once a node, not once a rank",
        ),
        source="hafs-community/HAFS#101; nextflow-io/nextflow#5932",
    ),
)

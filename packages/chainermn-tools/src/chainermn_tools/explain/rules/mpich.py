"""Failures that MPICH, its launcher Hydra, and its relative MVAPICH report."""

import re

from chainermn_tools.explain.rules.rule import ErrorRule, Kind

MPICH = "MPICH"
HYDRA = "MPICH's mpiexec (Hydra)"
MVAPICH = "MVAPICH2"
MANUAL = "ChainerMN's manual, troubleshooting"

RULES = (
    ErrorRule(
        name="mvapich-cma-forbidden",
        kind=Kind.ROOT_CAUSE,
        component=MVAPICH,
        literals=("CMA is not available. Set MV2_SMP_USE_CMA=0",),
        examples=(
            "[host0:mpi_rank_0][MPIDI_CH3I_SMP_init] CMA is not available. Set "
            "MV2_SMP_USE_CMA=0 to disable CMA.",
            "[cli_0]: aborting job:",
            "Fatal error in PMPI_Init_thread:",
            "Other MPI error, error stack:",
            "MPID_Init(365)...........: channel initialization failed",
            "MPIDI_CH3I_SMP_Init(2132): process_vm_readv: Operation not permitted",
        ),
        meaning="The kernel refuses to let a rank read another one's memory (process_vm_readv): "
        "a container's seccomp profile, or Yama's ptrace_scope.",
        fix=(
            "export MV2_SMP_USE_CMA=0   # on every host, for non-interactive shells too",
            "or allow it: docker run --cap-add=SYS_PTRACE ...",
        ),
        source=MANUAL,
    ),
    ErrorRule(
        name="mvapich-segmentation-fault",
        kind=Kind.AMBIGUOUS,
        component=MVAPICH,
        literals=("[error_sighandler] Caught error: Segmentation fault (signal 11)",),
        examples=(
            "[host0:mpi_rank_0][error_sighandler] Caught error: Segmentation fault (signal 11)",
        ),
        meaning="A rank touched an address that it must not. With GPUs the first suspect is GPU "
        "memory given to an MVAPICH2 whose CUDA support is off; without, a fork after InfiniBand "
        "was set up.",
        fix=(
            "export MV2_USE_CUDA=1   # on every host; check: ssh host1 env | grep MV2_",
            "data loaders: multiprocessing.set_start_method('forkserver') before MPI starts",
        ),
        source=f"{MANUAL}; ChainerMN's tips and FAQs (fork)",
    ),
    ErrorRule(
        name="hydra-cannot-connect-back",
        kind=Kind.ROOT_CAUSE,
        component=HYDRA,
        literals=("HYDU_sock_connect", "(check for firewalls!)"),
        pattern=re.compile(
            r"HYDU_sock_connect \(.*\): (?:unable to (?:connect from|get host address)"
            r"|connect error)|unable to connect to server \S+ at port \d+ \(check for firewalls!\)"
        ),
        examples=(
            "[proxy:0:1@host1] HYDU_sock_connect (utils/sock/sock.c:145): unable to connect from "
            '"host1" to "host0" (Connection refused)',
            "[proxy:0:1@host1] main (pm/pmiserv/pmip.c:183): unable to connect to server host0 "
            "at port 54762 (check for firewalls!)",
        ),
        meaning="The helper that was started on another host can't connect back to mpiexec: a "
        "firewall, or the first host's name means 127.* or nothing there.",
        fix=(
            "ssh host1 getent hosts host0   # must be an address that host1 can reach, not 127.*",
            "mpiexec -iface eth0 ...   # the network that the hosts share",
            "behind a firewall: export MPIEXEC_PORT_RANGE=50000:50100, and open those ports",
        ),
        source="pmodels/mpich#4599; pmodels/mpich#3777; pmodels/mpich#4712; wording as in 5.0.2",
    ),
    ErrorRule(
        name="hydra-proxy-not-found",
        kind=Kind.ROOT_CAUSE,
        component=HYDRA,
        literals=("hydra_pmi_proxy",),
        pattern=re.compile(
            r"hydra_pmi_proxy[\"']?: (?:No such file or directory|(?:command )?not found)"
            r"|execvp error on file \S*hydra_pmi_proxy"
        ),
        examples=(
            "bash: ./hydra_pmi_proxy: No such file or directory",
            "[mpiexec@host0] HYDU_create_process (./utils/launch/launch.c:74): execvp error on "
            "file hydra_pmi_proxy (No such file or directory)",
        ),
        meaning="mpiexec starts its helper at its own path on the other host, and it isn't there.",
        fix=(
            'ssh host1 ls "$(dirname "$(which mpiexec)")"   # must show hydra_pmi_proxy',
            "install the same MPICH (for pip: the same environment) at the same path everywhere",
        ),
        source="pmodels/mpich#1478; pmodels/mpich#1161; pmodels/mpich#6095",
    ),
    ErrorRule(
        name="hydra-cannot-start-program",
        kind=Kind.ROOT_CAUSE,
        component=HYDRA,
        literals=("execvp error on file ",),
        pattern=re.compile(r"execvp error on file (?!\S*hydra_pmi_proxy)"),
        examples=(
            "[proxy:0@host0] HYDU_create_process (lib/utils/launch.c:73): execvp error on file "
            "./train (No such file or directory)",
        ),
        meaning="The program is not there, or can't be executed, on the host that the line names.",
        fix=(
            "name the interpreter: mpiexec -n 2 python train.py",
            "on several hosts: the same Python and the same script at the same path everywhere",
        ),
        source="MPICH 5.0.2, run",
    ),
    ErrorRule(
        name="hydra-launch-failed",
        kind=Kind.SECONDARY,
        component=HYDRA,
        literals=("Launch proxy failed.",),
        examples=(
            "[mpiexec@host0] ui_cmd_cb (mpiexec/pmiserv_pmci.c:51): Launch proxy failed.",
            "[mpiexec@host0] main (mpiexec/mpiexec.c:270): process manager error waiting for "
            "completion",
        ),
        meaning="mpiexec could not start its helper on another host.",
        fix=("the line above it, mostly of ssh, says why",),
        source="MPICH 5.0.2, run with a host that doesn't exist",
    ),
    ErrorRule(
        name="mpich-no-network",
        kind=Kind.ROOT_CAUSE,
        component="MPICH over libfabric",
        literals=("OFI fi_getinfo() fail", "OFI fi_fabric failed"),
        examples=(
            "Abort(204069007): Fatal error in internal_Init_thread: Other MPI error, error stack:",
            "MPIDI_OFI_find_provider(84): ",
            "find_provider(170).........: OFI fi_getinfo() failure",
            "MPIDI_OFI_init_local(580): OFI fi_fabric failed "
            "(ofi_init.c:580:MPIDI_OFI_init_local:Invalid argument)",
        ),
        meaning="libfabric found no network that it can open: no interface is up, this host's "
        "name means nothing, or FI_PROVIDER names a provider that isn't there.",
        fix=(
            "unset FI_PROVIDER, or export FI_PROVIDER=tcp",
            "getent hosts $(hostname)   # must print an address; else add one to /etc/hosts",
        ),
        source="pmodels/mpich#6612; pmodels/mpich#6547; pmodels/mpich#6336",
    ),
    ErrorRule(
        name="mpich-init-failed",
        kind=Kind.AMBIGUOUS,
        component=MPICH,
        literals=(
            "Fatal error in internal_Init",
            "Fatal error in PMPI_Init",
            "Fatal error in MPI_Init",
        ),
        examples=(
            "Abort(940719887): Fatal error in internal_Init: Other MPI error, error stack:",
            "internal_Init(70)....: MPI_Init(argc=0x7fff6d6545c8, argv=0x7fff6d6545c0) failed",
            "MPII_Init_thread(212):",
            "MPII_init_gpu(52)....:  gpu_init failed",
            "Fatal error in PMPI_Init_thread:",
            "Fatal error in MPI_Init: Other MPI error, error stack:",
        ),
        meaning="MPI could not start; the last line of its error stack names the part that failed.",
        fix=(
            "when it is gpu_init: MPIR_CVAR_ENABLE_GPU=0 mpiexec ...",
            "MPIR_CVAR_DEBUG_SUMMARY=1 mpiexec -n 1 python -c 'from mpi4py import MPI'",
        ),
        source="pmodels/mpich#7469; pmodels/mpich#6612; pmodels/mpich#6336",
    ),
    ErrorRule(
        name="mpi-abort-called",
        kind=Kind.SECONDARY,
        component="MPI_Abort",
        literals=("application called MPI_Abort(", "MPI_ABORT was invoked on rank"),
        examples=(
            "Abort(3) on node 1 (rank 1 in comm 0): application called "
            "MPI_Abort(MPI_COMM_WORLD, 3) - process 1",
            "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD",
        ),
        meaning="A rank, which the line names, ended the job on purpose.",
        fix=("that rank said why before: read its traceback",),
        source="MPICH 5.0.2 and Open MPI 5.0.11, run",
    ),
)

"""Failures that ChainerMN's own packages report."""

import re

from chainermn_tools.explain.rules.rule import ErrorRule, Kind

OURS = "chainermn-comm"

RULES = (
    ErrorRule(
        name="ranks-disagree",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=("RankMismatchError: ",),
        examples=(
            "chainermn_comm.errors.RankMismatchError: allreduce on rank 0: ranks disagree on "
            "array: float64 (2,) on rank 0; float64 (3,) on rank 1",
            "chainermn_comm.errors.RankMismatchError: bcast on rank 0: ranks disagree on "
            "operation: bcast on rank 0; allreduce on rank 1",
        ),
        meaning="The ranks called different operations, or the same one with arguments that "
        "don't fit; the message lists what each rank gave.",
        fix=(
            "look for an `if comm.rank == ...` around a collective call, or a loop that ends "
            "earlier on one rank",
            "for gradients: build the same model on every rank, from the same arguments",
        ),
        source="chainermn-comm, run on 2 ranks",
    ),
    ErrorRule(
        name="exit-before-finalize",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=("before MPI was finalized, ending the job",),
        examples=(
            "ChainerMN: rank 1 of 2: os._exit(0) before MPI was finalized, ending the job.",
            "Where this is meant, call mpi4py.MPI.Finalize() first.",
        ),
        meaning="A rank left by os._exit, which skips MPI_Finalize, while others may wait for it.",
        fix=(
            "end the rank by sys.exit() or by reaching the end of the script",
            "if os._exit is meant: call mpi4py.MPI.Finalize() before it",
        ),
        source="chainermn-comm, run on 2 ranks",
    ),
    ErrorRule(
        name="rank-failed-first",
        kind=Kind.AMBIGUOUS,
        component=OURS,
        literals=("ChainerMN: rank ",),
        pattern=re.compile(r"ChainerMN: rank \d+ of \d+: (?:uncaught \w+|sys\.exit.*), ending"),
        examples=(
            "ChainerMN: rank 1 of 2: uncaught ValueError, ending the job.",
            "ChainerMN: rank 1 of 2: sys.exit(3), ending the job.",
            "ChainerMN: rank 0 of 2: sys.exit with a message, ending the job.",
        ),
        meaning="This rank failed and ended the job on purpose; its traceback or message comes "
        "right after this line, and is the thing to read.",
        fix=("read the traceback after the first such line; other ranks only followed",),
        source="chainermn-comm, run on 2 ranks",
    ),
    ErrorRule(
        name="peer-failed",
        kind=Kind.SECONDARY,
        component=OURS,
        literals=("PeerError: ",),
        examples=(
            "chainermn_comm.errors.PeerError: allreduce on rank 0 failed because of rank 1: "
            "TypeError: rank 1: expected an array, a scalar, or a tuple or list of them, got str; "
            "objects go through the method that ends in _obj",
        ),
        meaning="Another rank, which the message names, found an error before it could take part.",
        fix=("read that rank's own traceback",),
        source="chainermn-comm, run on 2 ranks",
    ),
    ErrorRule(
        name="finalized",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=("the communicator has been finalized",),
        examples=(
            "chainermn_comm.errors.FinalizedError: rank 0: the communicator has been finalized",
        ),
        meaning="A communicator was used after its finalize(), or after the `with` block that "
        "made it.",
        fix=("finalize last, or create another communicator",),
        source="chainermn-comm",
    ),
    ErrorRule(
        name="forked-child-communicates",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=("a process that the rank forked can't communicate",),
        examples=(
            "chainermn_comm.errors.CommunicationError: rank 0: a process that the rank forked "
            "can't communicate",
        ),
        meaning="A data loader's worker, or another child of a rank, used the communicator.",
        fix=("call the communicator in the rank itself only; pass children plain data",),
        source="chainermn-comm",
    ),
    ErrorRule(
        name="unknown-communicator",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=("unknown communicator '",),
        examples=(
            "ValueError: unknown communicator 'x'; use one of: dummy, flat, hierarchical, naive, "
            "non_cuda_aware, pure_nccl, single_node, two_dimensional",
        ),
        meaning="create_communicator got a name that doesn't exist.",
        fix=("chainermn.create_communicator()   # 'hierarchical', good on CPUs and GPUs",),
        source="chainermn-comm",
    ),
    ErrorRule(
        name="pure-nccl-without-gpus",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=(
            "communicator 'pure_nccl' is for GPUs",
            "communicator 'pure_nccl' takes gradients",
        ),
        examples=(
            "ValueError: communicator 'pure_nccl' is for GPUs, and CuPy can't be imported (No "
            "module named 'cupy'); on CPUs use one of: dummy, flat, hierarchical, naive, "
            "non_cuda_aware, single_node, two_dimensional",
            "ValueError: rank 0: communicator 'pure_nccl' takes gradients on GPUs, and these are "
            "NumPy arrays; move the model to the GPU (to_gpu), or on CPUs use one of: flat, "
            "hierarchical, naive, single_node, two_dimensional",
        ),
        meaning="pure_nccl works on GPU arrays only, and there is no GPU, no CuPy, or the model "
        "was never moved to the GPU.",
        fix=(
            "on CPUs: chainermn.create_communicator('hierarchical')",
            "on GPUs: model.to_gpu() before training; `chainermn env` shows what CuPy finds",
        ),
        source="chainermn-comm",
    ),
    ErrorRule(
        name="single-node-on-several",
        kind=Kind.ROOT_CAUSE,
        component=OURS,
        literals=("takes ranks of one node, and these are on",),
        examples=(
            "ValueError: rank 0: communicator 'single_node' takes ranks of one node, and these "
            "are on 2; use 'hierarchical'",
        ),
        meaning="The communicator is for one machine and the ranks are on several.",
        fix=("chainermn.create_communicator('hierarchical')",),
        source="chainermn-comm",
    ),
    ErrorRule(
        name="no-room-in-shared-memory",
        kind=Kind.WARNING,
        component=OURS,
        literals=("ChainerMN: no room for shared memory in",),
        examples=(
            "ChainerMN: no room for shared memory in /dev/shm on some node; gradients go through "
            "MPI instead",
        ),
        meaning="/dev/shm is full or small (containers: 64 MB), so gradients take a slower way.",
        fix=(
            "df -h /dev/shm   # a job that was killed may have left files there",
            "docker run --shm-size=1g ...   # or --ipc=host",
        ),
        source="chainermn-comm",
    ),
    ErrorRule(
        name="no-shared-memory",
        kind=Kind.WARNING,
        component=OURS,
        literals=(
            "ChainerMN: the memory that MPI calls shared is not",
            "ChainerMN: shared memory could not be allocated",
        ),
        examples=(
            "ChainerMN: the memory that MPI calls shared is not, on some node; gradients go "
            "through MPI instead",
            "ChainerMN: shared memory could not be allocated on some node: Other MPI error; "
            "gradients go through MPI instead",
        ),
        meaning="A node's ranks can't share memory, so gradients take a slower way.",
        fix=(
            "ulimit -n; ulimit -v   # files and memory that a process may have",
            "docker run --ipc=host ...   # where ranks of a node are in different containers",
        ),
        source="chainermn-comm",
    ),
)

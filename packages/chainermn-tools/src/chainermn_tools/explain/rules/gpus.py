"""Failures of GPUs: NCCL, CUDA, and CuPy, through which Chainer uses both."""

import re

from chainermn_tools.explain.rules.rule import ErrorRule, Kind

NCCL = "NCCL"
CUPY = "CuPy"
CUDA = "CUDA, through CuPy"
# The number is CUDA's major version; `nvidia-smi` says which the driver takes.
INSTALL_CUPY = "pip install 'cupy-cuda12x[ctk]'   # or 13x: at most nvidia-smi's CUDA Version"

RULES = (
    ErrorRule(
        name="nccl-shared-memory-full",
        kind=Kind.ROOT_CAUSE,
        component=NCCL,
        literals=("NCCL WARN Call to posix_fallocate failed", "Error while creating shared memory"),
        pattern=re.compile(r"posix_fallocate failed|creating shared memory segment \S*nccl"),
        examples=(
            "host0:2143:2561 [1] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No "
            "space left on device",
            "Error while creating shared memory segment /dev/shm/nccl-1YsMbG (size 7340384)",
        ),
        meaning="/dev/shm is too small for NCCL's buffers between GPUs of one host.",
        fix=(
            "docker run --shm-size=1g ...   # or --ipc=host; the default is 64 MB",
            "export NCCL_SHM_DISABLE=1   # a slower way round",
        ),
        source="NVIDIA/nccl#290; NVIDIA/nccl#342; pytorch/torchtitan#853",
    ),
    ErrorRule(
        name="nccl-two-ranks-one-gpu",
        kind=Kind.ROOT_CAUSE,
        component=NCCL,
        literals=("Duplicate GPU detected : rank",),
        examples=(
            "host0:29880:30398 [0] init.cc:497 NCCL WARN Duplicate GPU detected : rank 2 and "
            "rank 0 both on CUDA device 1000",
        ),
        meaning="Two ranks of a host use the same GPU, which NCCL doesn't allow.",
        fix=(
            "chainer.backends.cuda.get_device_from_id(comm.intra_rank).use()   # first of all",
            "start at most as many ranks a host as it has GPUs: nvidia-smi -L",
        ),
        source="horovod/horovod#3929; facebookresearch/fairchem#597",
    ),
    ErrorRule(
        name="nccl-no-interface",
        kind=Kind.ROOT_CAUSE,
        component=NCCL,
        literals=("Bootstrap : no socket interface found",),
        examples=(
            "host0:22841:22841 [0] bootstrap.cc:37 NCCL WARN Bootstrap : no socket interface found",
        ),
        meaning="No network interface of this host fits NCCL_SOCKET_IFNAME, or only loopback is "
        "there.",
        fix=(
            "unset NCCL_SOCKET_IFNAME",
            "or name one that is on every host (ip -br addr): export NCCL_SOCKET_IFNAME=eth0",
        ),
        source="pytorch/pytorch#29482; NVIDIA/nccl#286; NVIDIA/nccl#210",
    ),
    ErrorRule(
        name="nccl-cannot-connect",
        kind=Kind.ROOT_CAUSE,
        component=NCCL,
        literals=("NCCL WARN socketStartConnect: Connect to ",),
        examples=(
            "host0:39964:40075 [0] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to "
            "192.0.2.2<45763> failed : Software caused connection abort",
        ),
        meaning="NCCL can't connect to another host: a firewall, or it chose an interface that "
        "the hosts don't share.",
        fix=(
            "export NCCL_SOCKET_IFNAME=eth0   # the interface that the hosts share",
            "the hosts must reach each other on all ports",
        ),
        source="NVIDIA/nccl-tests#166; NVIDIA/nccl-tests#162; NVIDIA/nccl#1016",
    ),
    ErrorRule(
        name="nccl-system-error",
        kind=Kind.AMBIGUOUS,
        component=NCCL,
        literals=("unhandled system error",),
        pattern=re.compile(r"NCCL.*unhandled system error|ncclSystemError"),
        examples=(
            "cupy_backends.cuda.libs.nccl.NcclError: NCCL_ERROR_SYSTEM_ERROR: unhandled system "
            "error",
            "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for "
            "details)",
        ),
        meaning="A call to the system failed under NCCL; only its own log says which.",
        fix=(
            "NCCL_DEBUG=INFO mpiexec -n 2 python train.py 2>&1 | grep 'NCCL WARN'",
            "df -h /dev/shm; ulimit -n; ulimit -l   # the usual three",
        ),
        source="chainer/chainermn#285; chainer/chainermn#218; NVIDIA/nccl#1657",
    ),
    ErrorRule(
        name="nccl-invalid-usage",
        kind=Kind.AMBIGUOUS,
        component=NCCL,
        literals=("NCCL_ERROR_INVALID_USAGE", "ncclInvalidUsage"),
        examples=(
            "cupy_backends.cuda.libs.nccl.NcclError: NCCL_ERROR_INVALID_USAGE: invalid usage",
            "torch.distributed.DistBackendError: NCCL error: ncclInvalidUsage: This usually "
            "reflects invalid usage of NCCL library.",
        ),
        meaning="Two ranks use one GPU, or NCCL's versions differ between ranks, or the driver "
        "is older than NCCL wants.",
        fix=(
            "NCCL_DEBUG=WARN mpiexec -n 2 python train.py 2>&1 | grep 'NCCL WARN'",
            "chainermn env   # on each host: NCCL's version, driver and GPUs",
        ),
        source="vllm-project/vllm#3152; cupy/cupy#9090; vllm-project/vllm#7201",
    ),
    ErrorRule(
        name="nccl-remote-error",
        kind=Kind.SECONDARY,
        component=NCCL,
        literals=("ncclRemoteError", "NCCL_ERROR_REMOTE_ERROR"),
        examples=(
            "ncclRemoteError: A call failed possibly due to a network error or a remote process "
            "exiting prematurely.",
            "cupy_backends.cuda.libs.nccl.NcclError: NCCL_ERROR_REMOTE_ERROR: remote process "
            "exited or there was a network error",
        ),
        meaning="Another rank ended, or the network between hosts broke.",
        fix=(
            "read the earliest traceback of all ranks: chainermn launch --prefix ...",
            "if no rank failed: NCCL_DEBUG=WARN, and with InfiniBand NCCL_IB_DISABLE=1, once",
        ),
        source="NVIDIA/nccl#2076; cupy/cupy#8662; NVIDIA/nccl#1141",
    ),
    ErrorRule(
        name="no-nccl-library",
        kind=Kind.ROOT_CAUSE,
        component=CUPY,
        literals=("libnccl.so.2: cannot open shared object file",),
        examples=(
            "Reason: ImportError (libnccl.so.2: cannot open shared object file: No such file or "
            "directory)",
        ),
        meaning="CuPy's wheel doesn't bring NCCL, and the loader finds none.",
        fix=(
            "pip install nvidia-nccl-cu12   # or -cu13, as CuPy's CUDA",
            "python -c 'from cupy.cuda import nccl; print(nccl.available)'   # must say True",
        ),
        source="alpa-projects/alpa#330; cupy/cupy#8710",
    ),
    ErrorRule(
        name="cuda-driver-too-old",
        kind=Kind.ROOT_CAUSE,
        component=CUDA,
        literals=("cudaErrorInsufficientDriver",),
        examples=(
            "cupy.cuda.runtime.CUDARuntimeError: cudaErrorInsufficientDriver: CUDA driver version "
            "is insufficient for CUDA runtime version",
        ),
        meaning="CuPy's CUDA is newer than NVIDIA's driver takes, or the process sees no real "
        "driver (a container without --gpus).",
        fix=(
            "nvidia-smi   # its CUDA Version must be at least that of the package",
            f"pip uninstall -y cupy-cuda13x, then {INSTALL_CUPY}",
        ),
        source="chainer/chainer#4166; cupy/cupy#9252; nagadomi/nunif#702",
    ),
    ErrorRule(
        name="cuda-no-device",
        kind=Kind.ROOT_CAUSE,
        component=CUDA,
        literals=("cudaErrorNoDevice",),
        examples=(
            "cupy.cuda.runtime.CUDARuntimeError: cudaErrorNoDevice: no CUDA-capable device is "
            "detected",
        ),
        meaning="This process sees no GPU: CUDA_VISIBLE_DEVICES hides them, a container has none, "
        "or the host has none.",
        fix=(
            'nvidia-smi -L; echo "[$CUDA_VISIBLE_DEVICES]"   # on the host that failed',
            "docker run --gpus all ...   # Slurm: --gpus-per-task=1",
        ),
        source="cupy/cupy#1147; cupy/cupy#2106; cupy/cupy#2549",
    ),
    ErrorRule(
        name="gpu-out-of-memory",
        kind=Kind.ROOT_CAUSE,
        component=CUDA,
        literals=("OutOfMemoryError: ", "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY"),
        pattern=re.compile(
            r"OutOfMemoryError: [Oo]ut of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEM"
        ),
        examples=(
            "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 200,000,000,000 bytes "
            "(allocated so far: 4,096 bytes).",
            "cupy.cuda.runtime.CUDARuntimeError: cudaErrorMemoryAllocation: out of memory",
            "cupy_backends.cuda.api.driver.CUDADriverError: CUDA_ERROR_OUT_OF_MEMORY: out of "
            "memory",
        ),
        meaning="The GPU's memory is full: too large a batch, several ranks or another program on "
        "one GPU, or old arrays that are still referred to.",
        fix=(
            "nvidia-smi   # who else is on it? is it one rank a GPU?",
            "a smaller batch; cupy.get_default_memory_pool().free_all_blocks() between phases",
        ),
        source="cupy/cupy#2242; chainer/chainer#5038",
    ),
    ErrorRule(
        name="cuda-headers-missing",
        kind=Kind.ROOT_CAUSE,
        component=CUPY,
        literals=("Failed to find CUDA headers", 'cannot open source file "vector_types.h"'),
        examples=(
            "RuntimeError: Failed to find CUDA headers",
            'cuda_fp16.h(129): catastrophic error: cannot open source file "vector_types.h"',
            "Compilation terminated.",
        ),
        meaning="CuPy compiles its kernels at first use, and CUDA's header files are missing "
        "(a wheel without [ctk], a container image without the toolkit).",
        fix=(
            INSTALL_CUPY,
            "or, where a toolkit is installed: export CUDA_PATH=/usr/local/cuda",
        ),
        source="cupy/cupy#8466; cupy/cupy#8593; READMEs of several projects",
    ),
    ErrorRule(
        name="cuda-library-missing",
        kind=Kind.ROOT_CAUSE,
        component=CUPY,
        literals=(": cannot open shared object file",),
        pattern=re.compile(
            r"lib(?:cublas|cublasLt|cudart|nvrtc|cufft|curand|cusolver|cusparse)\.so[.\d]*"
            r": cannot open shared object file"
        ),
        examples=(
            "ImportError: libcublas.so.12: cannot open shared object file: No such file or "
            "directory",
            "ImportError: libnvrtc.so.12: cannot open shared object file: No such file or "
            "directory",
            "Failed to import CuPy.",
        ),
        meaning="A CUDA library is missing, or CuPy is for another major version of CUDA than "
        "the one installed.",
        fix=(
            INSTALL_CUPY,
            "or, where that CUDA is installed: its lib64 folder in LD_LIBRARY_PATH",
        ),
        source="cupy/cupy#8446; dphnAI/sonar#336; cupy/cupy#8227",
    ),
    ErrorRule(
        name="nvrtc-does-not-know-gpu",
        kind=Kind.ROOT_CAUSE,
        component=CUPY,
        literals=("nvrtc: error: invalid value for --gpu-architecture",),
        examples=(
            "NVRTC compilation error: nvrtc: error: invalid value for --gpu-architecture (-arch)",
            "cupy.cuda.nvrtc.NVRTCError: NVRTC_ERROR_INVALID_OPTION (5)",
        ),
        meaning="This CUDA can't compile for this GPU: the card is newer than the toolkit, or "
        "CUDA dropped it (13 knows none older than Turing: GTX 16, RTX 20).",
        fix=(
            "nvidia-smi --query-gpu=name,compute_cap --format=csv",
            "an old card: cupy-cuda12x instead of cupy-cuda13x; a new one: pip install -U",
        ),
        source="cupy/cupy#1048; cupy/cupy#2087; cupy/cupy#9475",
    ),
    ErrorRule(
        name="no-binary-for-gpu",
        kind=Kind.ROOT_CAUSE,
        component=CUDA,
        literals=("CUDA_ERROR_NO_BINARY_FOR_GPU",),
        examples=(
            "cupy_backends.cuda.api.driver.CUDADriverError: CUDA_ERROR_NO_BINARY_FOR_GPU: no "
            "kernel image is available for execution on the device",
        ),
        meaning="There is compiled GPU code, but not for this card: an old toolkit is found "
        "first, or a kernel was cached for another card.",
        fix=(
            "rm -rf ~/.cupy/kernel_cache",
            "python -c 'import cupy; cupy.show_config()'   # CUDA root and NVRTC: new enough?",
        ),
        source="cupy/cupy#9106",
    ),
    ErrorRule(
        name="two-cupys",
        kind=Kind.WARNING,
        component=CUPY,
        literals=("CuPy may not function correctly because multiple CuPy packages",),
        examples=(
            "  CuPy may not function correctly because multiple CuPy packages are installed",
            "  in your environment:",
            "    cupy-cuda12x, cupy-cuda13x",
        ),
        meaning="Two distributions of CuPy share one folder and overwrite each other's files.",
        fix=(
            "pip uninstall -y cupy cupy-cuda11x cupy-cuda12x cupy-cuda13x",
            INSTALL_CUPY,
        ),
        source="gpustack/gpustack#5459; rapidsai/cugraph#3057",
    ),
    ErrorRule(
        name="cuda-after-fork",
        kind=Kind.ROOT_CAUSE,
        component=CUDA,
        literals=("cudaErrorInitializationError",),
        examples=(
            "cupy_backends.cuda.api.runtime.CUDARuntimeError: cudaErrorInitializationError: "
            "initialization error",
        ),
        meaning="A child that was forked after CUDA had started used the GPU, which CUDA "
        "doesn't survive.",
        fix=(
            "multiprocessing.set_start_method('forkserver')   # first thing, before MPI starts",
            "keep CuPy out of a data set's get_example",
        ),
        source="chainer/chainer#1087; chainer/chainer#7552; inducer/pycuda#137",
    ),
    ErrorRule(
        name="no-cudnn",
        kind=Kind.WARNING,
        component="Chainer",
        literals=("UserWarning: cuDNN is not enabled",),
        examples=(
            "chainer/backends/cuda.py:146: UserWarning: cuDNN is not enabled.",
            "Please reinstall CuPy after you install cudnn",
        ),
        meaning="CuPy has no cuDNN, so convolutions take a slower way. CuPy 14 supports none; "
        "of 13 only cupy-cuda12x 13.6 with cuDNN 8 does.",
        fix=(
            "export CHAINER_CUDNN=0   # if it is to stay so",
            "else: pip install 'cupy-cuda12x==13.6.*' 'nvidia-cudnn-cu12<9'",
        ),
        source="chainer/chainer#8596; chainer/chainer#4394",
    ),
)

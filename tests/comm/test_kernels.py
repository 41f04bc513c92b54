"""The CUDA source, compiled for every architecture where CuPy is, and as C++ run on the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib import util
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chainermn_comm import kernels
from chainermn_comm.summation import sum_rows, telling_of_overflow
from tests.support.kernel_double import (
    WIRES,
    cast,
    from_bfloat16,
    mean_of_rows,
    run_kernel,
    to_bfloat16,
)

COMPILER_SECONDS = 120
FLOATS = ("f2", "f4", "f8")

# What CUDA brings and C++ lacks. No thread of these kernels waits for another, so they may run
# one after the other.
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
void narrow(float wide, Half& h) { _Float16 x = wide; std::memcpy(&h, &x, 2); }
void narrow(double wide, Half& h) { _Float16 x = wide; std::memcpy(&h, &x, 2); }

template <typename Wire> static void run(
    void (*kernel)(const Part*, i64, Wire*, i64, double), unsigned first, unsigned blocks,
    const Part* parts, i64 count, void* wire, i64 size, double divisor
) {
    gridDim.x = blocks;
    for (blockIdx.x = first; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            kernel(parts, count, (Wire*)wire, size, divisor);
}
#define RUN(NAME) \\
    extern "C" void run_##NAME(unsigned first, unsigned blocks, \\
        const Part* parts, i64 count, void* wire, i64 size, double divisor) { \\
        run(NAME, first, blocks, parts, count, wire, size, divisor); \\
    }
RUN(pack_e) RUN(pack_f) RUN(pack_d) RUN(pack_b)
RUN(unpack_e) RUN(unpack_f) RUN(unpack_d) RUN(unpack_b)

template <typename Wire> static void run_sum(
    void (*kernel)(const i64*, i64, Wire*, i64, double), unsigned blocks,
    const i64* rows, i64 count, void* out, i64 size, double divisor
) {
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            kernel(rows, count, (Wire*)out, size, divisor);
}
#define RUN_SUM(NAME) \\
    extern "C" void run_##NAME(unsigned, unsigned blocks, \\
        const i64* rows, i64 count, void* out, i64 size, double divisor) { \\
        run_sum(NAME, blocks, rows, count, out, size, divisor); \\
    }
RUN_SUM(sum_e) RUN_SUM(sum_f) RUN_SUM(sum_d) RUN_SUM(sum_b)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels as functions: ``run(name, first block, blocks, table, wire address, ...)``."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cpp").write_text(SHIM % kernels.source())
    subprocess.run(
        [
            *("g++", "-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function"),
            *("-fsanitize=undefined", "-fno-sanitize-recover", "-fPIC", "-shared", "-Werror"),
            *("-o", "kernels.so", "kernels.cpp"),
        ],
        cwd=folder,
        check=True,
        timeout=COMPILER_SECONDS,
    )
    library = ctypes.CDLL(str(folder / "kernels.so"))

    def run(name, first, blocks, table, wire, size, divisor=1.0):
        function = getattr(library, f"run_{name}")
        pointer, i64 = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = [
            *(ctypes.c_uint, ctypes.c_uint, pointer, i64, pointer, i64, ctypes.c_double)
        ]
        function(first, blocks, table.ctypes.data, len(table) - 1, wire, size, divisor)

    return run


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="compiles the kernels as C++, and there is no g++"
)


def memory(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


def interesting(rng, size: int, dtype: str) -> np.ndarray:
    """Numbers of all magnitudes: too large or too small for the narrow ones, and no numbers."""
    with np.errstate(over="ignore"):
        values = (rng.standard_normal(size) * 10.0 ** rng.integers(-9, 9, size)).astype(dtype)
    values[rng.random(size) < 0.02] = np.inf
    values[rng.random(size) < 0.02] = np.nan
    values[rng.random(size) < 0.02] = -0.0
    return values


def table_of(grads: list[np.ndarray]) -> np.ndarray:
    ends = np.cumsum([0] + [grad.size for grad in grads])
    rows = [(begin, g.ctypes.data, g.itemsize) for begin, g in zip(ends[:-1], grads, strict=True)]
    return np.array([*rows, (ends[-1], 0, 0)], np.int64)


def check(compiled, letter: str, sizes: list[int], dtypes: list[str], offset: int, grid: int):
    rng = np.random.default_rng([*sizes, offset])
    grads = [
        interesting(rng, size + offset, dtype)[offset:]  # aligned to its own size and no more
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    table, total = table_of(grads), sum(sizes)
    blocks = min(-(-total // kernels.TILE), grid)
    mine, expected = (np.full(total + offset + 1, 7, WIRES[letter]) for _ in range(2))
    for buffer, run in ((mine, None), (expected, run_kernel)):
        wire = buffer.ctypes.data + offset * buffer.itemsize
        if run is None:
            compiled(f"pack_{letter}", 0, blocks, table, wire, total, 3.0)
        elif total:
            run(f"pack_{letter}", memory, table.ctypes.data, len(grads), wire, total, 3.0)
    np.testing.assert_array_equal(mine, expected)
    before = [grad.copy() for grad in grads]
    for grad in grads:
        grad[...] = 0
    compiled(f"unpack_{letter}", 0, blocks, table, mine.ctypes.data + offset * mine.itemsize, total)
    got = [grad.copy() for grad in grads]
    if total:
        wire = expected.ctypes.data + offset * expected.itemsize
        run_kernel(
            f"unpack_{letter}", memory, table.ctypes.data, len(grads), wire, total, divisor=1.0
        )
    for one, other, old in zip(got, grads, before, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.shape == old.shape


@needs_compiler
@pytest.mark.parametrize(("letter", "dtype"), list(product(WIRES, FLOATS)))
def test_every_pairing_of_dtypes(compiled, letter, dtype):
    check(compiled, letter, [5, 0, 4099, 1], [dtype] * 4, offset=1, grid=1 << 16)


@needs_compiler
@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(WIRES)),
    st.lists(
        st.tuples(
            st.one_of(st.integers(0, 9), st.sampled_from([2047, 2048, 2049, 5000])),
            st.sampled_from(FLOATS),
        ),
        max_size=40,
    ),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_any_mix_of_arrays(compiled, letter, arrays, offset, grid):
    check(compiled, letter, [n for n, _ in arrays], [d for _, d in arrays], offset, grid)


@needs_compiler
def test_every_bfloat16_goes_up_and_every_tie_to_even(compiled):
    """All bfloat16 numbers; and floats on, and just beside, the middle between two of them."""
    every = np.arange(1 << 16, dtype=np.uint16)
    up = np.zeros(every.size, "f4")
    compiled("unpack_b", 0, 32, table_of([up]), every.ctypes.data, every.size)
    np.testing.assert_array_equal(up.view("u4"), every.astype("u4") << 16)
    for rest in (0x7FFF, 0x8000, 0x8001):
        values = (up.view("u4") + np.uint32(rest)).view("f4")
        bits = np.zeros(every.size, np.uint16)
        compiled("pack_b", 0, 32, table_of([values]), bits.ctypes.data, bits.size)
        finite = np.isfinite(up)
        odd = every % 2
        rounds_up = rest > 0x8000 if rest != 0x8000 else odd == 1
        np.testing.assert_array_equal(bits[finite], (every + rounds_up)[finite])
        nans = np.isnan(values)
        assert np.all((bits[nans] & 0x7FFF) > 0x7F80)


@needs_compiler
@pytest.mark.skipif(util.find_spec("ml_dtypes") is None, reason="there is no ml_dtypes")
@pytest.mark.parametrize("dtype", FLOATS)
def test_bfloat16_has_the_bits_of_numpys_casts(compiled, dtype):
    import ml_dtypes

    values = interesting(np.random.default_rng(0), 50_000, dtype)
    bits = np.zeros(values.size, np.uint16)
    compiled("pack_b", 0, 32, table_of([values]), bits.ctypes.data, bits.size)
    np.testing.assert_array_equal(
        bits.view(ml_dtypes.bfloat16).astype("f4"),
        values.astype(ml_dtypes.bfloat16).astype("f4"),
    )


@needs_compiler
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("letter", ["e", "f", "d"])
def test_sums_have_the_bits_of_cpus(compiled, letter, count):
    rng = np.random.default_rng(count)
    rows = [interesting(rng, 5000, WIRES[letter]) for _ in range(count)]
    largest = np.finfo(WIRES[letter]).max
    for row in rows:  # whose sums overflow, and whose means don't
        row[:50] = largest
    table = np.array([row.ctypes.data for row in rows] + [0])
    for divisor in (1.0, float(count)):
        expected, got = np.empty_like(rows[0]), np.empty_like(rows[0])
        with telling_of_overflow() if divisor > 1 else np.errstate(all="ignore"):
            sum_rows([row.copy() for row in rows], expected, divisor)
        compiled(f"sum_{letter}", 0, 3, table, got.ctypes.data, got.size, divisor)
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(mean_of_rows(rows, divisor), expected)


@needs_compiler
def test_sums_of_bfloat16_are_rounded_once(compiled):
    rng = np.random.default_rng(0)
    rows = [to_bfloat16(interesting(rng, 5000, "f4")) for _ in range(3)]
    table, got = np.array([row.ctypes.data for row in rows] + [0]), np.empty_like(rows[0])
    compiled("sum_b", 0, 3, table, got.ctypes.data, got.size, 3.0)
    found, expected = (from_bfloat16(bits) for bits in (got, mean_of_rows(rows, 3.0)))
    np.testing.assert_array_equal(found, expected)


@needs_compiler
@pytest.mark.parametrize("letter", sorted(WIRES))
def test_offsets_beyond_32_bits(compiled, letter):
    """The last tile of a chunk of more than 2^33 elements, of which no other is touched."""
    tiles = (1 << 33) // kernels.TILE + 3
    size, tail = tiles * kernels.TILE, 100
    wire, grad = np.zeros(kernels.TILE, WIRES[letter]), np.arange(kernels.TILE, dtype="f4")
    last = np.arange(tail, dtype="f8")
    far = size - kernels.TILE
    table = np.array(
        [
            (0, 0, 8),
            (5, grad.ctypes.data - (far - 5) * 4, 4),  # its offset is beyond 32 bits too
            (size - tail, last.ctypes.data, 8),
            (size, 0, 0),
        ]
    )
    start = wire.ctypes.data - far * wire.itemsize
    compiled(f"pack_{letter}", tiles - 1, tiles, table, start, size, 2.0)
    expected = np.concatenate([grad[:-tail], last]) / 2
    packed = cast(expected, wire.dtype)
    np.testing.assert_array_equal(wire, packed)
    grad[:], last[:] = 0, 0
    compiled(f"unpack_{letter}", tiles - 1, tiles, table, start, size)
    np.testing.assert_array_equal(grad[:-tail], cast(packed[:-tail], "f4"))
    np.testing.assert_array_equal(grad[-tail:], 0)
    np.testing.assert_array_equal(last, cast(packed[-tail:], "f8"))


@pytest.mark.skipif(
    util.find_spec("cupy") is None, reason="compiles with NVRTC through CuPy, which isn't installed"
)
@pytest.mark.parametrize("architecture", [70, 75, 80, 86, 89, 90])
def test_every_kernel_compiles_for_every_gpu(architecture):
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(kernels.source(), "kernels.cu", (), ())
    options = (f"--gpu-architecture=sm_{architecture}", "--std=c++17")
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        raise AssertionError(nvrtc.getProgramLog(program)) from error
    binary = nvrtc.getCUBIN(program)
    for verb, letter in product(("pack", "unpack", "sum"), WIRES):
        assert f"{verb}_{letter}".encode() in binary

"""The only CUDA source: kernels that pack a chunk's gradients and unpack them.

They walk a table of a chunk's segments, and cast and divide on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..layout import Chunk
from . import devices

THREADS = 256
# Elements that each thread has under way at once.
EACH = 8
TILE = THREADS * EACH
# A few times the number of blocks that a device runs at once. Each block searches once for
# its tiles.
MAX_BLOCKS = 1 << 12
# Registers of a thread. With more registers, a device runs fewer threads at once; with
# fewer, the kernel for packing spills registers.
REGISTERS = 40
# The wire dtypes by name, each with its letter in a kernel's name.
DTYPE_CODES = {"float16": "e", "float32": "f", "float64": "d", "bfloat16": "b"}

_KERNELS = r"""
typedef long long i64;
struct Half { unsigned short bits; };
struct Bfloat { unsigned short bits; };  // the upper half of a float's bits
union Single { float value; unsigned bits; };

// A stretch of a gradient: where it begins in the chunk, its address, its itemsize in bytes.
// The row after the last begins where the chunk ends.
struct Part { i64 begin; i64 address; i64 itemsize; };

#ifdef __CUDACC__  // without CUDA, in a test, the includer defines these three
__device__ inline float widen(Half h) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(h.bits));
    return wide;
}
__device__ inline void narrow(float wide, Half& h) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(wide));
}
__device__ inline void narrow(double wide, Half& h) {
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(h.bits) : "d"(wide));
}
#endif
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline void narrow(double wide, float& x) { x = (float)wide; }
__device__ inline void narrow(double wide, double& x) { x = wide; }

// Without cuda_bf16.h, which isn't everywhere where NVRTC is, and before sm_80 does the same.
__device__ inline float widen(Bfloat b) {
    Single x;
    x.bits = (unsigned)b.bits << 16;
    return x.value;
}
__device__ inline void narrow(float wide, Bfloat& b) {  // to nearest, ties to even
    Single x;
    x.value = wide;
    bool is_nan = (x.bits & 0x7fffffffu) > 0x7f800000u;
    unsigned rounded = is_nan ? x.bits | 0x400000u : x.bits + 0x7fffu + (x.bits >> 16 & 1u);
    b.bits = (unsigned short)(rounded >> 16);
}
// By way of float, as NumPy's casts to bfloat16 (those of ml_dtypes) do.
__device__ inline void narrow(double wide, Bfloat& b) { narrow((float)wide, b); }

// Computes in float32, or in float64 where either side has it. All loads go out before the
// first result is needed. A full tile takes no comparisons, which would make divisions wait.
template <bool DIVIDE, bool FULL, typename From, typename To>
__device__ inline void move(const From* from, To* to, int count, double divisor) {
    typedef decltype(widen(From()) + widen(To())) Wide;
    From raw[EACH];
    #pragma unroll
    for (int k = 0; k < EACH; ++k) {
        int i = threadIdx.x + k * THREADS;
        if (FULL || i < count) raw[k] = from[i];
    }
    #pragma unroll
    for (int k = 0; k < EACH; ++k) {
        int i = threadIdx.x + k * THREADS;
        if (FULL || i < count) {
            Wide wide = widen(raw[k]);
            narrow(DIVIDE ? wide / (Wide)divisor : wide, to[i]);
        }
    }
}

template <bool PACK, typename Wire, typename Grad>
__device__ inline void copy(i64 address, i64 offset, Wire* wire, int count, double divisor) {
    Grad* grad = (Grad*)address + offset;
    bool full = count == TILE;
    if (PACK && full) move<true, true>(grad, wire, count, divisor);
    else if (PACK) move<true, false>(grad, wire, count, divisor);
    else if (full) move<false, true>(wire, grad, count, 1.0);
    else move<false, false>(wire, grad, count, 1.0);
}

// The last part that begins at or before the element.
__device__ inline i64 find(const Part* parts, i64 count, i64 element) {
    i64 low = 0, high = count;
    while (high - low > 1) {
        i64 middle = low + (high - low) / 2;
        if (parts[middle].begin <= element) low = middle;
        else high = middle;
    }
    return low;
}

template <bool PACK, typename Wire>
__device__ inline void walk(
    const Part* parts, i64 count, Wire* wire, i64 size, double divisor
) {
    // A block takes tiles in a row, so that it searches once.
    i64 tiles = (size + TILE - 1) / TILE, each = (tiles + gridDim.x - 1) / gridDim.x * TILE;
    i64 first = blockIdx.x * each, stop = first + each < size ? first + each : size;
    for (i64 p = first < stop ? find(parts, count, first) : 0; first < stop;) {
        const Part& part = parts[p];
        i64 end = parts[p + 1].begin, last = first + TILE < stop ? first + TILE : stop;
        if (last >= end) {
            last = end;
            ++p;
        }
        int n = (int)(last - first);
        i64 address = part.address, offset = first - part.begin;
        switch (part.itemsize) {
        case 2: copy<PACK, Wire, Half>(address, offset, wire + first, n, divisor); break;
        case 4: copy<PACK, Wire, float>(address, offset, wire + first, n, divisor); break;
        case 8: copy<PACK, Wire, double>(address, offset, wire + first, n, divisor); break;
        }
        first = last;
    }
}

#define KERNEL(NAME, PACK, Wire)                                                           \
    extern "C" __global__ void NAME(                                                       \
        const Part* parts, i64 count, Wire* wire, i64 size, double divisor) {              \
        walk<PACK>(parts, count, wire, size, divisor);                                     \
    }
#define KERNELS(LETTER, Wire) KERNEL(pack_##LETTER, true, Wire) KERNEL(unpack_##LETTER, false, Wire)
KERNELS(e, Half)
KERNELS(f, float)
KERNELS(d, double)
KERNELS(b, Bfloat)
"""
SOURCE = (
    f"#define THREADS {THREADS}\n#define EACH {EACH}\n#define TILE {TILE}\n{_KERNELS}"
)


def rows_of(chunk: Chunk) -> int:
    """Return how many rows of a :func:`segment_table` are a chunk's."""
    return len(chunk.segments) + 1


def segment_table(chunks: Sequence[Chunk], flats: Sequence[Any]) -> np.ndarray:
    """Return the table that the kernels walk, for all chunks one after the other.

    The table is (rows, 3) int64: begin, address, itemsize. Each chunk has a row for each
    of its segments of these contiguous GPU arrays, and a row that ends the chunk.
    """
    addresses = [devices.address(flat) for flat in flats]
    table = []
    for chunk in chunks:
        for index, span, place in chunk.segments:
            itemsize = flats[index].dtype.itemsize
            address = addresses[index] + span.start * itemsize
            table.append((place.start, address, itemsize))
        table.append((chunk.size, 0, 0))
    return np.array(table, np.int64).reshape(-1, 3)


def launch(name: str, chunk: Chunk, table: Any, buffer: Any, divisor: int = 1) -> None:
    """Run the kernel "pack" or "unpack" on the current stream; return at once.

    ``table`` begins with the chunk's :func:`segment_table`, and ``buffer`` has room for
    the chunk's bytes. Both are on the GPU. Packing divides elements, in float32 or
    wider, before they are rounded.
    """
    letter = DTYPE_CODES[chunk.dtype.name]
    kernel = devices.kernel(SOURCE, f"{name}_{letter}", REGISTERS)
    blocks = min(-(-chunk.size // TILE), MAX_BLOCKS)
    count = np.int64(len(chunk.segments))
    arguments = (table, count, buffer, np.int64(chunk.size), np.float64(divisor))
    kernel((blocks,), (THREADS,), arguments)

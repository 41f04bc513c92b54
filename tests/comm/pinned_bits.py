"""Bits of means and sums by every name, topology and wire dtype, as they were when written down.

mpiexec -n N python -m tests.comm.pinned_bits    # writes down those of N ranks
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.support.worlds.models import Model, Param
from tests.support.worlds.topologies import NAMES, on_nodes, telling

FILE = Path(__file__).parent / "given" / "bits.json"
WIRES = (None, "float16", "float32", "float64")
# A large array is divided into chunks, and a few small ones are packed together.
SHAPES = ((300_001,), (7, 11), (), (40_000,), (0, 3), (513,))
DTYPES = ("float32", "float16", "float64", "float32", "float32", "bfloat16")
SUMMED = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "int8",
    "uint32",
    "int64",
    "bool",
)


def numbers(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Of all magnitudes that float16 has, and on every NumPy the same."""
    size = int(np.prod(shape))
    state = np.arange(size, dtype=np.uint64) + np.uint64(seed << 32 | 1)
    for factor in (6364136223846793005, 1442695040888963407):
        state = (state ^ state >> np.uint64(29)) * np.uint64(factor)
    mantissa = (state >> np.uint64(40)).astype(np.float64) / 2**23 - 1
    exponents = (state & np.uint64(15)).astype(int) - 10
    drawn = np.ldexp(mantissa, exponents)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if kind.kind in "iu":
        drawn = (drawn * 64).astype(np.int64)
    return drawn.astype(kind).reshape(shape)


def _digest(arrays) -> str:
    joined = b"".join(np.asarray(array).tobytes() for array in arrays)
    return hashlib.sha256(joined).hexdigest()[:12]


def found(size: int) -> Iterator[tuple[str, str]]:
    """A name for each case on so many ranks, and the digest of its bits (collective)."""
    for name, wire in product(NAMES, WIRES):
        for nodes in telling(name, size):
            where = f"{name} {''.join(map(str, nodes))}"
            with on_nodes(nodes, name, allreduce_grad_dtype=wire) as comm:
                model = Model()
                for number, (shape, dtype) in enumerate(
                    zip(SHAPES, DTYPES, strict=True)
                ):
                    grad = numbers(10 * comm.rank + number, shape, dtype)
                    model.params[f"p{number}"] = Param(np.zeros_like(grad), grad)
                comm.multi_node_mean_grad(model)
                # What travels in 16 bits where there is a network has a digest of its own.
                by_width: dict[str, list[np.ndarray]] = {}
                for param in model.params.values():
                    how = ""
                    if wire == "float16" or (wire is None and param.data.itemsize == 2):
                        how = " in 16 bits"
                    by_width.setdefault(how, []).append(param.grad)
                for how, means in by_width.items():
                    yield f"{where} {wire}{how}", _digest(means)
                if wire is None:
                    sums = [
                        comm.allreduce(numbers(comm.rank, (70_001,), dtype))
                        for dtype in SUMMED
                    ]
                    yield f"{where} sums", _digest(sums)


def main():
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    bits = dict(found(size))
    if MPI.COMM_WORLD.rank == 0:
        known = {}
        if FILE.exists():
            known = json.loads(FILE.read_text())
        FILE.parent.mkdir(exist_ok=True)
        text = json.dumps({**known, str(size): bits}, indent=0, sort_keys=True) + "\n"
        FILE.write_text(text)


if __name__ == "__main__":
    main()

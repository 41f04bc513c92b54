"""The benchmark of GPUs, with a double in place of a device: it runs, and misses what is missed."""

import io
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
from rich.console import Console

from tests.support.doubles import gpus
from tests.support.doubles.cupy_double import installed
from tests.support.jobs.scripts import ROOT, imported

pytestmark = [pytest.mark.world, pytest.mark.sizes(1, 2)]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Its module, on the double of the process's device."""
    with imported(ROOT / "benchmarks" / "gpu.py") as module, installed() as device:
        device.delay = 0
        monkeypatch.setattr(module, "ROUNDS", 2)
        # Chainer's own copy needs more of CuPy than the double has.
        monkeypatch.setattr(
            module, "bundled", lambda *_: (None, "bundled pure_nccl: not measured")
        )
        yield module


@pytest.mark.ranks(1, 2)  # with one there is no NCCL to compare with
def test_it_measures_kernels_and_calls_beside_their_peers(world, benchmark):
    said = io.StringIO()
    shapes = {"a": (70, 60), "b": (), "c": (5,)}
    rows = benchmark.run(world, shapes, Console(file=said, width=80))  # as in a file
    assert [row["limit"] for row in rows] == [
        f"{kernel}, wire {wire}: part of a copy's bandwidth"
        for wire in ("float32", "float16")
        for kernel in ("pack", "unpack")
    ] * (world.rank == 0)
    assert all(
        row["ratio"] is not None and row["must"] == "at least 0.8" for row in rows
    )
    if world.rank:
        return
    text = said.getvalue()
    for name in (
        "copy, wire float16",
        "pure_nccl",
        "hierarchical",
        "two_dimensional",
        "flat",
    ):
        assert name in text
    assert ("NCCL's allReduce" in text) == ("not measured" in text) == (world.size > 1)
    assert "WRONG" not in text
    assert "…" not in text, text


def test_a_slow_kernel_misses_its_limit(world, benchmark):
    rates = {
        "copy": np.full(3, 100.0),
        "pack": np.full(3, 79.0),
        "unpack": np.full(3, 81.0),
    }
    assert [row["ok"] for row in benchmark.limits("float32", rates)] == [False, True]


def test_a_wrong_mean_is_noticed(world, benchmark):
    grads = [gpus.put(np.zeros(3, np.float32))]

    def half_right() -> None:
        grads[0][...] = (world.size - 1) / 2 + (world.rank == 0)

    assert not benchmark.is_mean(world, grads, half_right)

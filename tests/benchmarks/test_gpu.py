"""The benchmark of GPUs runs with a double in place of a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.doubles.cupy_double import installed
from tests.support.jobs.scripts import ROOT, imported


@pytest.mark.world
@pytest.mark.sizes(1, 2)  # with one rank there is no NCCL to compare with
def test_it_measures_kernels_and_calls_beside_their_peers(world, capsys):
    model = "digits MLP 64-100-100-10"
    args = SimpleNamespace(model=model, rounds=2, json=None)
    with imported(ROOT / "benchmarks" / "gpu.py") as gpu, installed() as device:
        device.delay = 0
        assert gpu.run(args, world)
    said = capsys.readouterr().out
    if world.rank == 0:
        for name in ("copy", *gpu.KERNELS, *gpu.NAMES):
            assert said.count(f"\n{name} ") == 2, said  # with both wires
        assert ("NCCL's allReduce" in said) == (world.size > 1)
        assert said.count("at least 0.8") == 4

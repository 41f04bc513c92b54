"""The doctor's checks of GPUs, whose driver, CuPy and NCCL are made up."""

from __future__ import annotations

import pytest

from tests.support.doctor import Unavailable

GPU = "570.86.15, NVIDIA H200, 143771 MiB"
# What nvidia-smi prints after an update of the driver without a restart.
MISMATCH = "echo Failed to initialize NVML: Driver/library version mismatch; exit 18"
BROKEN = Unavailable("ImportError: libcublas.so.12: cannot open shared object file")
OLD = "2.3.7"


def echo(*lines: str) -> str:
    return "; ".join(f"echo '{line}'" for line in lines)


H200 = echo(GPU)


@pytest.fixture
def gpus(machine):
    """Plants GPUs: nvidia-smi (None for no such program), CuPy's version, what it and NCCL say."""

    def plant(smi=H200, cupy="13.6.0", devices=2, nccl="2.22.3", **variables):
        machine.path("/usr/bin", "/bin") if smi is None else machine.program("nvidia-smi", smi)
        machine.packages(**({} if cupy is None else {"cupy_cuda12x": cupy}))
        seen = {"cuda": "12.4", "devices": [{}] * devices} if type(devices) is int else devices
        machine.children(devices=seen, nccl=nccl)
        if nccl != OLD:  # else that of the communicators is asked for
            machine.children(oldest_nccl=[2, 4])
        machine.gpu_files()
        machine.variables(**variables)
        return machine

    return plant


@pytest.mark.parametrize(
    ("smi", "files", "status"),
    [
        (echo(GPU, GPU), ("nvidia0", "nvidia1"), "ok"),
        (None, (), "skipped"),
        (None, ("nvidiactl", "nvidia-uvm"), "skipped"),
        (None, ("nvidia0", "nvidiactl"), "ok"),
        (None, ("0000:01:00.0",), "ok"),
        (MISMATCH, ("nvidia0",), "failed"),
        (MISMATCH, (), "skipped"),
        (echo("No devices were found"), (), "skipped"),
        ("true", (), "skipped"),
    ],
)
def test_drivers_are_judged(gpus, smi, files, status):
    machine = gpus(smi)
    machine.gpu_files(*files)
    found = machine.look("gpus")
    assert found.status == status
    if status == "ok" and smi is None:
        assert found.found.startswith("1 GPUs"), "files beside a GPU's own are none"


@pytest.mark.parametrize(
    ("planted", "status", "said", "fix"),
    [
        ({"smi": None}, "skipped", "no NVIDIA GPU", None),
        ({"cupy": None}, "warning", "not installed", "'cupy-cuda12x[ctk]'"),
        (
            {"cupy": None, "smi": echo(GPU.replace("570", "580"))},
            "warning",
            "not installed",
            "'cupy-cuda13x[ctk]'",
        ),
        ({"devices": BROKEN}, "failed", "libcublas", ""),
        ({"devices": 0}, "failed", "sees no GPU", "nvidia-smi -L"),
        (
            {"CUDA_VISIBLE_DEVICES": "-1"},
            "warning",
            "hides the GPUs",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        ({}, "ok", "sees 2 GPUs", None),
    ],
    ids=["no GPU", "missing", "missing, new driver", "broken", "blind", "hidden", "well"],
)
def test_cupy_missing_broken_and_blind_is_told_apart(gpus, planted, status, said, fix):
    found = gpus(**planted).look("cupy")
    assert (found.status, said in found.found) == (status, True), found
    assert (found.fix is None) if fix is None else found.fix.endswith(fix)


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("2.22.3", "ok", "2.22.3"),
        ("2.7.8", "ok", "bfloat16"),
        (OLD, "failed", "too old; 2.4 is the oldest"),
        ("absent", "warning", "absent"),
    ],
)
def test_an_absent_nccl_is_not_an_old_one(gpus, version, status, said):
    found = gpus(nccl=version).look("nccl")
    assert (found.status, said in found.found) == (status, True)
    assert status == "ok" or found.fix.endswith("pip install -U nvidia-nccl-cu12")


@pytest.mark.parametrize(
    ("ranks", "setting", "status"),
    [
        (None, None, "ok"),
        (2, None, "ok"),
        (4, None, "failed"),
        (2, "0,1", "ok"),
        (2, "0,1,9", "failed"),
        (None, "GPU-1,GPU-2,nonsense", "failed"),
    ],
)
def test_fewer_visible_gpus_than_ranks_are_named(gpus, ranks, setting, status):
    found = gpus(CUDA_VISIBLE_DEVICES=setting).look("visible gpus", ranks=ranks)
    assert found.status == status
    assert "2 visible" in found.found

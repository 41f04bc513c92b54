"""The doctor's checks of GPUs, whose driver, CuPy and NCCL are made up."""

from __future__ import annotations

import time

import pytest

from chainermn_tools.doctor import facts
from chainermn_tools.doctor.check import Context
from chainermn_tools.doctor.here import gpus
from chainermn_tools.environment import packages, probe

LIMIT_SECONDS = 60


def context(**asked) -> Context:
    return Context(time.monotonic() + LIMIT_SECONDS, **asked)


H200 = "570.86.15, NVIDIA H200, 143771 MiB"


def with_gpus(monkeypatch, lines, cupy=None, devices=2, nccl="2.22.3", files=0, **variables):
    """A machine as its driver, CuPy and NCCL describe it; exceptions are raised."""

    def gives(value):
        def give(*_):
            if isinstance(value, Exception):
                raise value
            return value

        return give

    versions = dict.fromkeys((*packages.OURS, "cupy", "nvidia-nccl"))
    if cupy is not None:
        del versions["cupy"]
        versions["cupy-cuda12x"] = cupy
    seen = (
        devices if isinstance(devices, Exception) else {"cuda": "12.4", "devices": [{}] * devices}
    )
    monkeypatch.setattr(facts, "versions", gives(versions))
    monkeypatch.setattr(gpus, "of_driver", gives(lines))
    monkeypatch.setattr(gpus, "of_cupy", gives(seen))
    monkeypatch.setattr(gpus.gpus, "with_cupy", gives(nccl))
    monkeypatch.setattr(gpus.probe, "in_child", gives([2, 4]))
    monkeypatch.setattr(gpus, "device_files", lambda: [f"nvidia{n}" for n in range(files)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


NO_SMI = probe.Unavailable("no nvidia-smi on PATH")
# What nvidia-smi prints after an update of the driver without a restart.
MISMATCH = probe.Unavailable(
    "nvidia-smi ended with exit code 18: Failed to initialize NVML: Driver/library version mismatch"
)


@pytest.mark.parametrize(
    ("lines", "files", "status"),
    [
        ([H200, H200], 2, "ok"),
        (NO_SMI, 0, "skipped"),
        (NO_SMI, 1, "ok"),
        (MISMATCH, 1, "failed"),
        (MISMATCH, 0, "skipped"),
        (["No devices were found"], 0, "skipped"),
        ([], 0, "skipped"),
    ],
)
def test_drivers_are_judged(monkeypatch, lines, files, status):
    with_gpus(monkeypatch, lines, files=files)
    assert gpus.driver.look(context()).status == status


def test_cupy_missing_broken_and_blind_is_told_apart(monkeypatch):
    with_gpus(monkeypatch, NO_SMI, cupy="13.6.0")
    assert gpus.cupy.look(context()).status == "skipped", "no GPU to use"
    with_gpus(monkeypatch, [H200])
    answer = gpus.cupy.look(context())
    assert (answer.status, answer.fix.split()[-1]) == ("warning", "'cupy-cuda12x[ctk]'")
    with_gpus(monkeypatch, [H200.replace("570", "580")])
    assert gpus.cupy.look(context()).fix.split()[-1] == "'cupy-cuda13x[ctk]'"
    broken = probe.Unavailable("ImportError: libcublas.so.12: cannot open shared object file")
    with_gpus(monkeypatch, [H200], cupy="13.6.0", devices=broken)
    answer = gpus.cupy.look(context())
    assert (answer.status, "libcublas" in answer.found) == ("failed", True)
    with_gpus(monkeypatch, [H200], cupy="13.6.0", devices=0)
    assert gpus.cupy.look(context()).status == "failed"
    with_gpus(monkeypatch, [H200], cupy="13.6.0", CUDA_VISIBLE_DEVICES="-1")
    answer = gpus.cupy.look(context())
    assert (answer.status, answer.fix) == ("warning", "unset CUDA_VISIBLE_DEVICES")
    with_gpus(monkeypatch, [H200], cupy="13.6.0")
    assert "sees 2 GPUs" in gpus.cupy.look(context()).found


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("2.22.3", "ok", "2.22.3"),
        ("2.7.8", "ok", "bfloat16"),
        ("2.3.7", "failed", "too old"),
        ("absent", "warning", "absent"),
    ],
)
def test_an_absent_nccl_is_not_an_old_one(monkeypatch, version, status, said):
    with_gpus(monkeypatch, [H200], cupy="13.6.0", nccl=version)
    answer = gpus.nccl.look(context())
    assert (answer.status, said in answer.found) == (status, True)
    assert status == "ok" or answer.fix.endswith("pip install -U nvidia-nccl-cu12")


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
def test_fewer_visible_gpus_than_ranks_are_named(monkeypatch, ranks, setting, status):
    variables = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    with_gpus(monkeypatch, [H200, H200], cupy="13.6.0", devices=2, **variables)
    answer = gpus.visible_gpus.look(context(ranks=ranks))
    assert answer.status == status
    assert "2 visible" in answer.found


def test_the_oldest_nccl_is_that_of_the_communicators():
    assert probe.in_child(gpus.oldest_nccl, LIMIT_SECONDS) == [2, 4]


def test_device_files_are_those_of_gpus(monkeypatch, tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(gpus, "DRIVER_FOLDERS", (tmp_path, tmp_path / "none"))
    assert sorted(gpus.device_files()) == ["nvidia0", "nvidia1"]
    (tmp_path / "proc" / "0000:01:00.0").mkdir(parents=True)
    monkeypatch.setattr(gpus, "DRIVER_FOLDERS", (tmp_path / "dev", tmp_path / "proc"))
    assert gpus.device_files() == ["0000:01:00.0"]

"""What `chainermn bench` reports, made up, and measurements that end soon."""

from __future__ import annotations

import pytest

from chainermn_tools.bench import timing, worker
from chainermn_tools.launch import JobResult


def report(ranks: int = 2, **changes: object) -> dict[str, object]:
    """One of which everything is known."""
    rows = []
    for size in (1024 * 4**power for power in range(10)):
        for name, operation in (
            ("flat", "mean_grad"),
            ("flat", "bcast"),
            (None, "memcpy"),
        ):
            seconds = 1e-5 + size / (5e9 if operation == "memcpy" else 1e9)
            algbw = size / seconds / 1e9
            row = {
                "communicator": name,
                "operation": operation,
                "size": size,
                "bytes": size,
            }
            row |= {"correct": True, "seconds": seconds, "algbw": algbw}
            rows.append({**row, "busbw": algbw * (ranks > 1)})
    known = {
        "ranks": ranks,
        "nodes": 1,
        "hosts": ["here"] * ranks,
        "cores": 2,
        "mpi": "MPICH 5",
    }
    return {
        **known,
        "correct": True,
        "checks": [],
        "results": rows,
        "skipped": [],
        **changes,
    }


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time few calls."""
    for name, value in (
        ("MAX_ROUNDS", 4),
        ("BATCH_SECONDS", 1e-4),
        ("WARM_UP_CALLS", 2),
    ):
        monkeypatch.setattr(timing, name, value)


def start_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test where `chainermn bench` starts to measure."""
    for name in ("measure_on", "measure_here"):
        monkeypatch.setattr(worker, name, lambda *_: pytest.fail("started"))


def measured(monkeypatch: pytest.MonkeyPatch, correct: bool) -> None:
    """Have `chainermn bench` find this instead of measuring."""
    found = JobResult(True, 0), report(correct=correct)
    monkeypatch.setattr(worker, "measure_on", lambda *_: found)

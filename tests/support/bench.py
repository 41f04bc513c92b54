"""What `chainermn bench` reports, made up, and measurements that end soon."""

from __future__ import annotations

import pytest

from chainermn_tools.bench import timing


def report(ranks: int = 2, **changes: object) -> dict[str, object]:
    """One of which everything is known."""
    rows = []
    for power in range(10):
        size = 1024 * 4**power
        for name, operation in (("flat", "mean_grad"), ("flat", "bcast"), (None, "memcpy")):
            seconds = 1e-5 + size / (5e9 if operation == "memcpy" else 1e9)
            row = {"communicator": name, "operation": operation, "size": size, "bytes": size}
            algbw = size / seconds / 1e9
            rows.append(
                {
                    **row,
                    "right": True,
                    "seconds": seconds,
                    "algbw": algbw,
                    "busbw": algbw * (ranks > 1),
                }
            )
    known: dict[str, object] = {
        "ranks": ranks,
        "nodes": 1,
        "hosts": ["here"] * ranks,
        "cores": 2,
        "mpi": "MPICH 5",
        "right": True,
        "checks": [],
        "results": rows,
        "skipped": [],
    }
    return {**known, **changes}


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time few calls."""
    for name, value in (("MOST_ROUNDS", 4), ("BATCH_SECONDS", 1e-4), ("WARM_UP_CALLS", 2)):
        monkeypatch.setattr(timing, name, value)

"""What is timed, by name. It imports nothing, so that arguments are checked before ranks start."""

from __future__ import annotations

ALONE, BARRIER, RAW, BUNDLED = "no exchange", "barrier", "raw packing", "bundled naive"
DUMMY, SYNCHRONOUS, DOUBLE, OVERLAPPED = (
    "dummy",
    "synchronous",
    "double buffering",
    "overlapped",
)
UNCOMPARED = "drift ignored"  # synchronous, without comparing parameters and state
DDP = "DDP over gloo"
WAYS = (
    ALONE,
    BARRIER,
    RAW,
    BUNDLED,
    DUMMY,
    SYNCHRONOUS,
    UNCOMPARED,
    DOUBLE,
    OVERLAPPED,
    DDP,
)
# They show what one machine's memory and Python take, which is little beside a link.
ONE_MACHINE_WAYS = (RAW, BUNDLED, DUMMY)

# By name: widths, batch, and whether batches are normalized, as in
# `step_models.Perceptron`.
ONE_MACHINE_MODELS: dict[str, tuple[tuple[int, ...], int, bool]] = {
    "digits": ((64, 100, 100, 10), 100, False),
    "u = 200": ((784, 200, 200, 10), 100, False),
    "u = 1000": ((784, 1000, 1000, 10), 100, False),
    "25 million": ((784, 4600, 4600, 10), 100, False),
}
# 7.2 MB take a link of 1 Gbit/s 60 ms. With 1600 examples computing takes three times
# that.
HOSTS_MODELS: dict[str, tuple[tuple[int, ...], int, bool]] = {
    "3 layers, batch 1600": ((784, 1000, 1000, 10), 1600, False),
    "3 layers, batch 400": ((784, 1000, 1000, 10), 400, False),
    "8 layers, batch 400": ((784, *[1000] * 7, 10), 400, False),
    "8 layers, batch 1600": ((784, *[1000] * 7, 10), 1600, False),
    "8 layers, batch 400, normalized": ((784, *[1000] * 7, 10), 400, True),
}


def models_of(hosts: bool) -> dict[str, tuple[tuple[int, ...], int, bool]]:
    """Return the models for several hosts, or for one machine."""
    return HOSTS_MODELS if hosts else ONE_MACHINE_MODELS


def ways_of(hosts: bool) -> list[str]:
    """Return the ways for several hosts, or for one machine."""
    return [way for way in WAYS if not (hosts and way in ONE_MACHINE_WAYS)]

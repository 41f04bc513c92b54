"""What the ranks of `chainermn bench` do: check, measure, skip."""

import functools
import itertools
from typing import Any

import pytest

from chainermn_tools.bench import runner
from tests.support.tools.bench import shorten

pytestmark = [pytest.mark.world, pytest.mark.sizes(1, 3)]
QUICK: dict[str, Any] = {"sizes": [1024, 4096], "seconds": 60.0}
OPERATIONS = ("allreduce", "bcast", "allgather", "send")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    shorten(monkeypatch)


def measure(world, names=("flat",), **changes):
    said: list[str] = []
    report = runner.measure(
        world, list(names), **{**QUICK, **changes, "log": said.append}
    )
    assert bool(said) == (world.rank == 0)
    return report


def test_all_is_measured_and_the_numbers_fit(world):
    report = measure(world, ["flat", "hierarchical", "pure_nccl"])
    assert world.allgather(report["results"]) == [report["results"]] * world.size
    assert report["correct"] is True
    assert report["ranks"] == len(report["hosts"]) == world.size
    assert report["nodes"] == 1
    assert [entry["communicator"] for entry in report["skipped"]] == ["pure_nccl"]
    operations = [name for name in OPERATIONS if world.size > 1 or name != "send"]
    rows = {
        (r["communicator"], r["operation"], r["size"]): r for r in report["results"]
    }
    once: list[tuple[str | None, str]] = [
        ("flat", "mean_grad"),
        ("hierarchical", "mean_grad"),
    ]
    once += [("flat", name) for name in operations] + [
        (None, name) for name in runner.BASELINES
    ]
    assert rows.keys() == {(*one, size) for one in once for size in QUICK["sizes"]}
    checked = {(row["communicator"], row["operation"]) for row in report["checks"]}
    wanted = ["mean_grad", *operations]
    assert checked == {
        (name, one) for name in ("flat", "hierarchical") for one in wanted
    }
    kinds = {**runner.OPERATIONS, **runner.BASELINES}
    for row in rows.values():
        assert row["size"] - 4 * world.size < row["bytes"] <= row["size"]
        assert 0 < row["fastest_seconds"] <= row["seconds"] <= row["slowest_seconds"]
        assert row["calls"] >= 1
        assert row["algbw"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        factor = kinds[row["operation"]].bus_factor(world.size)
        assert row["busbw"] == pytest.approx(row["algbw"] * factor)


@pytest.fixture
def spoil(monkeypatch):
    """Put something else in the place of a method of the naive communicator."""
    make = runner.create_communicator

    def replace(method, by):
        def spoilt(name, comm):
            made = make(name, comm)
            if name == "naive":
                setattr(
                    made, method, functools.partial(by, made, getattr(made, method))
                )
            return made

        monkeypatch.setattr(runner, "create_communicator", spoilt)

    return replace


@pytest.mark.parametrize("after", [0, 6])
def test_wrong_values_are_found_on_any_rank_before_and_after(world, spoil, after):
    calls = itertools.count(1)

    def wrong(comm, mean, model, zero_fill=False):
        mean(model, zero_fill)
        if next(calls) > after and comm.rank == comm.size - 1:
            for _, param in model.namedparams():
                param.grad[-1] += 1

    spoil("multi_node_mean_grad", wrong)
    report = measure(world, ["naive", "flat"])
    assert report["correct"] is False
    rows = {
        (row["communicator"], row["operation"], row["size"]): row
        for row in report["results"]
    }
    assert rows["naive", "mean_grad", 1024]["correct"] is False
    assert ("seconds" in rows["naive", "mean_grad", 1024]) == (after > 0)
    assert ("naive", "mean_grad", 4096) not in rows  # not tried again
    assert rows["flat", "mean_grad", 4096]["correct"] is True
    checks = {
        (row["communicator"], row["operation"]): row["correct"]
        for row in report["checks"]
    }
    assert checks["naive", "mean_grad"] is (after > 0)


def test_what_a_communicator_raises_is_told_and_the_others_go_on(world, spoil):
    def fail(comm, *_, **__):
        raise RuntimeError(f"broken on {comm.rank}")

    spoil("bcast", fail)
    report = measure(world, ["naive"])
    assert report["correct"] is False
    assert {row["operation"] for row in report["results"] if not row["correct"]} == {
        "bcast"
    }
    row = next(row for row in report["checks"] if row["operation"] == "bcast")
    assert row["problem"] == "rank 0: RuntimeError: broken on 0"


def test_what_does_not_fit_into_any_ranks_memory_is_skipped(world, monkeypatch):
    room = 5 * 1024 if world.rank == world.size - 1 else 1 << 40
    monkeypatch.setattr(runner, "available_bytes", lambda ranks: room)
    report = measure(world, sizes=[1024, 4096, 16384])
    assert {row["size"] for row in report["results"]} == {1024}
    assert [entry["bytes"] for entry in report["skipped"]] == [4096, 16384]
    assert all(
        f"rank {world.size - 1}" in entry["reason"] for entry in report["skipped"]
    )
    assert report["correct"] is True


def test_without_time_or_a_communicator_nothing_is_measured(world):
    for report in (
        late := measure(world, seconds=1e-6),
        none := measure(world, ["pure_nccl"]),
    ):
        assert report["results"] == []
        assert report["correct"] is False
    assert [entry["bytes"] for entry in late["skipped"]] == QUICK["sizes"]
    assert all("--seconds" in entry["reason"] for entry in late["skipped"])
    assert none["nodes"] is None

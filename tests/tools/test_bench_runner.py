"""What the ranks of `chainermn bench` do: check, measure, skip."""

import itertools

import pytest

from chainermn_comm import create_communicator
from chainermn_tools.bench import runner

pytestmark = [pytest.mark.world, pytest.mark.sizes(1, 3)]
SIZES = [1024, 4096]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Make one round."""
    monkeypatch.setattr(runner, "SECONDS", 0.0)


def test_all_is_measured(world):
    report = runner.measure(world, ["flat", "hierarchical", "pure_nccl"], SIZES)
    assert world.allgather(report) == [report] * world.size
    assert report.correct
    assert report.problems == []
    assert [line.partition(":")[0] for line in report.skipped] == ["pure_nccl"]
    titles = ["mean of gradients, flat", "mean of gradients, hierarchical"]
    titles += ["allreduce", "bcast", "allgather"]
    if world.size > 1:
        titles.append("send there and back")
    titles += ["copy in own memory", "plain MPI_Allreduce"]
    assert [*report.times] == titles
    for times in report.times.values():
        assert [*times] == SIZES
        assert min(times.values()) > 0


@pytest.fixture
def naive(world):
    """The class of the communicator ``naive``, where faults are planted."""
    comm = create_communicator("naive", world)
    comm.finalize()
    return type(comm)


@pytest.mark.parametrize("after", [0, 6])
def test_wrong_values_are_found_on_any_rank_before_and_after(
    world, naive, after, monkeypatch
):
    calls = itertools.count(1)
    mean = naive.multi_node_mean_grad

    def wrong(comm, model, zero_fill=False):
        mean(comm, model, zero_fill)
        if next(calls) > after and comm.rank == comm.size - 1:
            for _, param in model.namedparams():
                param.grad[-1] += 1

    monkeypatch.setattr(naive, "multi_node_mean_grad", wrong)
    report = runner.measure(world, ["naive", "flat"], SIZES)
    assert not report.correct
    # And the second size isn't tried.
    assert report.problems == ["mean of gradients, naive, 1 KiB: wrong values"]
    assert "mean of gradients, naive" not in report.times
    assert [*report.times["mean of gradients, flat"]] == SIZES


def test_what_a_communicator_raises_is_told_and_the_others_go_on(
    world, naive, monkeypatch
):
    def fail(comm, *_, **__):
        raise RuntimeError(f"broken on {comm.rank}")

    monkeypatch.setattr(naive, "bcast", fail)
    report = runner.measure(world, ["naive"], SIZES)
    assert report.problems == ["bcast, 1 KiB: rank 0: RuntimeError: broken on 0"]
    assert [*report.times["allgather"]] == SIZES


def test_without_a_communicator_nothing_is_measured(world):
    report = runner.measure(world, ["pure_nccl", "flatt"], SIZES)
    assert (report.times, report.correct) == ({}, False)
    assert report.skipped[0] == "pure_nccl: it exchanges no arrays in host memory"
    assert "flatt" in report.skipped[1]

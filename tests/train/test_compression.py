"""Compressed gradients: what users ask for, what ranks keep of them, and what fails."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext
from functools import partial

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer.training import extensions

from chainermn_comm import PeerError, RankMismatchError
from chainermn_train import (
    PowerSGD,
    create_multi_node_checkpointer,
    create_multi_node_optimizer,
    multi_node_snapshot,
)
from chainermn_train.extensions import CompressionReport
from tests.support.training.exchanges import KINDS, states
from tests.support.training.small_models import Model, TanhNet, batch_of, sgd, update
from tests.support.training.trainers import (
    load_state,
    logged,
    parameter_bits,
    same_everywhere,
    state_of,
    trainer_over,
)
from tests.support.worlds.topologies import on_nodes

pytestmark = [pytest.mark.world, pytest.mark.sizes(2, 3)]

WIDTH = 20
FACTORED = PowerSGD(2, start_step=2, min_ratio=1)
small_net = partial(TanhNet, n_in=WIDTH, width=WIDTH)


def compressed(comm, seed=0, compression=FACTORED, **settings):
    return create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1),
        comm,
        compression=compression,
        **settings,
    ).setup(small_net(seed))


def train(optimizer, start, stop):
    rank = optimizer.communicator.rank
    for number in range(start, stop):
        batch = batch_of(rank, number, width=WIDTH)
        optimizer.update(optimizer.target, batch)


def kept(optimizer):
    """Return the bits of all that a rank has."""
    return {**states(optimizer), "error": optimizer.compression_error}


def warning_of_errors(is_there):
    """A block in which this rank is warned that it goes on without errors, or not."""
    if is_there:
        return pytest.warns(RuntimeWarning, match="has none of this rank")
    return nullcontext()


# What is asked for.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"compression": FACTORED, "overlap": True}, "without overlap"),
        ({"compression": FACTORED, "double_buffering": True}, "without overlap"),
        ({"compression": "float8"}, r"allreduce_grad_dtype must be .* got 'float8'"),
    ],
)
def test_what_can_not_be_is_refused(naive, arguments, words):
    with pytest.raises(ValueError, match=words):
        create_multi_node_optimizer(chainer.optimizers.SGD(), naive, **arguments)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_travel_in_one_dtype(plain_communicator, dtype):
    from mpi4py import MPI

    plain = plain_communicator(MPI.COMM_WORLD)
    for comm in on_nodes(range(plain.size), allreduce_grad_dtype="float16"), plain:
        with pytest.raises(ValueError, match="choose one of the two"):
            create_multi_node_optimizer(
                chainer.optimizers.SGD(), comm, compression=dtype
            )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["synchronous", "double buffering", "overlap"])
def test_a_dtype_does_what_the_communicators_does(kind, dtype):
    from mpi4py import MPI

    nodes = range(MPI.COMM_WORLD.size)
    found = []
    for wire, compression in (None, None), (dtype, None), (None, dtype):
        comm = on_nodes(nodes, allreduce_grad_dtype=wire)
        arguments = KINDS[kind].arguments
        optimizer = compressed(comm, compression=compression, **arguments)
        train(optimizer, 0, 5)
        optimizer.flush()
        assert optimizer.communicator.get_config("allreduce_grad_dtype") == (
            None if wire is None else np.dtype(wire)
        )
        found.append(parameter_bits(optimizer.target))
        optimizer.finalize()
        comm.finalize()
    assert found[1] == found[2] != found[0]


def test_the_communicators_dtype_stays_as_its_user_sets_it_later():
    from mpi4py import MPI

    comm = on_nodes(range(MPI.COMM_WORLD.size))
    optimizer = compressed(comm, compression="float16", overlap=False)
    comm.set_config("allreduce_grad_dtype", np.float32)
    train(optimizer, 0, 2)
    assert comm.get_config("allreduce_grad_dtype") == np.float32
    comm.finalize()


def test_ranks_that_ask_for_different_compressions_are_told(naive):
    compression = PowerSGD(2 if naive.rank else 3)
    optimizer = compressed(naive, compression=compression)
    with pytest.raises(RankMismatchError, match=r"compression.*PowerSGD"):
        train(optimizer, 0, 1)


def test_it_says_once_what_it_compresses(naive, capfd):
    train(compressed(naive), 0, 5)
    said = capfd.readouterr().err
    if naive.rank:
        assert said == ""
        return
    # 20 x 20, 20, 3 x 20, 3, 1 and 2 numbers; in the place of the matrices 2 x 40 and
    # 2 x 23.
    assert said.count("ChainerMN:") == 1
    assert "PowerSGD(rank=2, " in said
    assert "sends 152 of 486 numbers a step, from start_step on" in said


def test_first_steps_are_not_compressed(naive):
    plain = compressed(naive, compression=None, overlap=False)
    optimizer = compressed(naive)
    for number in range(4):
        train(plain, number, number + 1)
        train(optimizer, number, number + 1)
        assert same_everywhere(naive, optimizer.target)
        is_compressed = number >= FACTORED.start_step
        assert (optimizer.compression_error > 0) == is_compressed
        alike = parameter_bits(plain.target) == parameter_bits(optimizer.target)
        assert alike != is_compressed


def test_frozen_parameters_take_no_memory(naive):
    optimizer = compressed(naive, compression=PowerSGD(2, 0, 1))
    optimizer.target.first.disable_update()
    train(optimizer, 0, 3)
    assert list(optimizer._updates.exchange._matrices) == ["/second/W"]


def test_an_array_may_get_another_shape(naive):
    optimizer = create_multi_node_optimizer(
        chainer.optimizers.SGD(), naive, compression=FACTORED
    ).setup(small_net(0))
    train(optimizer, 0, 4)
    net = optimizer.target
    for param in net.first.params():
        param.array = param.array[:10]
    net.second.W.array = net.second.W.array[:, :10]
    train(optimizer, 4, 7)
    assert same_everywhere(naive, net)


@pytest.mark.parametrize("remaining", [["first"], []])
def test_the_errors_of_links_that_are_gone_do_not_count(naive, remaining):
    optimizer = compressed(naive)
    train(optimizer, 0, 4)
    net = optimizer.target
    for name in {"first", "second"}.difference(remaining):
        delattr(net, name)
    inputs = batch_of(naive.rank, width=WIDTH)

    def loss_of_rest():
        return sum([F.sum(net[name](inputs)) for name in remaining], net.scale * 2)

    optimizer.update(loss_of_rest)
    errors = [
        optimizer._updates.exchange._matrices[f"/{name}/W"].error for name in remaining
    ]
    expected = np.linalg.norm(np.array(errors))
    assert optimizer.compression_error == pytest.approx(expected)


# What ranks keep.


def test_training_resumes_with_the_same_bits(naive):
    optimizer = compressed(naive)
    train(optimizer, 0, 5)
    saved = copy.deepcopy([state_of(optimizer.target), state_of(optimizer)])
    twin = copy.deepcopy(optimizer)
    train(optimizer, 5, 9)
    expected = kept(optimizer)
    resumed = compressed(naive, seed=1)
    load_state(resumed.target, saved[0])
    load_state(resumed, saved[1])
    resumed.assume_synchronized()
    for each in twin, resumed:
        train(each, 5, 9)
        assert kept(each) == expected


@pytest.mark.parametrize("rank", [1, 3])
def test_a_snapshot_of_another_rank_or_rank_of_factors_lacks_what_does_not_fit(
    naive, rank
):
    optimizer = compressed(naive)
    train(optimizer, 0, 5)
    theirs = naive.bcast_obj(state_of(optimizer))
    other = compressed(naive, compression=PowerSGD(rank, 2, 1))
    load_state(other.target, state_of(optimizer.target))
    with warning_of_errors(naive.rank == naive.size - 1):
        load_state(other, theirs)
    other.assume_synchronized()
    assert other.compression_error == 0
    train(other, 5, 8)
    assert other.compression_error > 0
    assert same_everywhere(naive, other.target)
    own = compressed(naive)
    load_state(own.target, state_of(optimizer.target))
    with warning_of_errors(naive.rank == naive.size - 1):
        load_state(own, theirs)
    assert (own.compression_error > 0) == (naive.rank == 0)


@pytest.mark.parametrize("has_all", [True, False])
def test_snapshots_of_all_ranks_have_all_errors(naive, folder, has_all):
    """Unlike one of rank 0 for all ranks."""
    examples = batch_of(naive.rank, 0, width=WIDTH)
    bits = []
    for start, stop in (0, 8), (8, 12), (0, 12):
        optimizer = compressed(naive)
        trainer = trainer_over(examples, 2, optimizer, (stop, "iteration"), folder)
        snapshot = extensions.snapshot(autoload=start > 0)
        sets = [range(naive.size)]
        if has_all:
            sets = [[rank] for rank in range(naive.size)]
        if stop == 8 or start > 0:
            trainer.extend(
                multi_node_snapshot(naive, snapshot, sets), trigger=(8, "iteration")
            )
        is_last = naive.rank == naive.size - 1
        with warning_of_errors(start > 0 and is_last and not has_all):
            trainer.run()
        bits.append(kept(optimizer))
    assert (bits[1] == bits[2]) == has_all


def trainer_of(comm, folder):
    """Return a trainer of a few updates, with a checkpointer that loads."""
    optimizer = compressed(comm)
    examples = batch_of(comm.rank, 0, width=WIDTH)
    trainer = trainer_over(examples, 2, optimizer, (8, "iteration"), folder)
    checkpointer = create_multi_node_checkpointer("run", comm, path=str(folder))
    checkpointer.maybe_load(trainer, optimizer)
    return trainer, checkpointer, optimizer


def test_other_numbers_of_ranks_go_on_without_errors(naive, folder):
    trainer, checkpointer, optimizer = trainer_of(naive, folder)
    trainer.run()
    checkpointer.save(trainer)
    error = optimizer.compression_error
    assert error > 0
    again = trainer_of(naive, folder)[-1]
    assert again.compression_error == error
    part = naive.split(int(naive.rank > 0), naive.rank)
    if naive.rank == 0:
        with warning_of_errors(True):
            _, _, alone = trainer_of(part, folder)
        assert alone.compression_error == 0
        train(alone, 0, 2)
        assert alone.compression_error > 0
    naive.handshake("done")


def test_without_errors_other_numbers_of_ranks_are_not_warned(naive, recwarn):
    optimizer = compressed(naive)
    train(optimizer, 0, FACTORED.start_step)
    alone = compressed(naive.split(naive.rank, 0))
    load_state(alone, state_of(optimizer))
    assert not recwarn.list


# What fails.


def test_memory_that_runs_out_between_factors_leaves_parameters_as_they_were(
    naive, monkeypatch
):
    optimizer = compressed(naive)
    train(optimizer, 0, 4)
    before = states(optimizer)
    error = PeerError
    with monkeypatch.context() as patch:
        if naive.rank == 1:
            error = MemoryError
            matrix = sys.modules[
                "chainermn_train.optimizers.exchanges.power_sgd"
            ].Matrix
            patch.setattr(matrix, "make_right", lambda _: np.empty(1 << 50))
        with pytest.raises(error):
            train(optimizer, 4, 5)
    assert states(optimizer) == before
    train(optimizer, 5, 8)  # the first one shares rank 0's state
    assert optimizer.t == 6
    assert same_everywhere(naive, optimizer.target)


def test_failing_losses_leave_errors_as_they_were(naive):
    optimizer = compressed(naive)
    train(optimizer, 0, 4)
    before = kept(optimizer)
    lossfun = optimizer.target
    if naive.rank == 1:
        lossfun = lambda x: 1 / 0  # noqa: E731
    with pytest.raises((PeerError, ZeroDivisionError)):
        optimizer.update(lossfun, batch_of(0, 0, width=WIDTH))
    assert kept(optimizer) == before


@pytest.mark.filterwarnings("ignore:Non finite number found in param.grad")
@pytest.mark.parametrize("name", ["first", "second", "scale"])
def test_an_overflow_leaves_errors_as_they_were(naive, name):
    """Of a gradient that is compressed or not, on one rank."""
    optimizer = compressed(naive)
    optimizer.loss_scaling(interval=100)
    train(optimizer, 0, 4)
    before = kept(optimizer)
    optimizer.target.cleargrads()
    batch = batch_of(naive.rank, 4, width=WIDTH)
    optimizer.target(batch).backward(loss_scale=optimizer._loss_scale)
    if naive.rank == 1:
        params = dict(optimizer.target.namedparams())
        param = params.get(f"/{name}/W", params.get(f"/{name}"))
        param.grad = np.full(param.shape, np.inf, "f")
    optimizer.update()
    after = kept(optimizer)
    assert after["error"] == before["error"] > 0
    assert after["/first/W"] == before["/first/W"]
    train(optimizer, 5, 7)
    assert optimizer.compression_error != before["error"]
    assert same_everywhere(naive, optimizer.target)


def test_a_trainer_reports_the_error(naive, tmp_path):
    optimizer = compressed(naive)
    examples = batch_of(naive.rank, 0, width=WIDTH)
    trainer = trainer_over(examples, 2, optimizer, (4, "iteration"), tmp_path)
    trainer.extend(CompressionReport(), trigger=(2, "iteration"))
    errors = [entry["compression/error"] for entry in logged(trainer, (2, "iteration"))]
    assert errors[0] == 0  # before the first step that is compressed
    assert errors[1] == optimizer.compression_error > 0


def test_other_optimizers_have_no_error(naive):
    optimizer = sgd(naive, Model(0))
    update(optimizer, 2)
    assert optimizer.compression_error == 0

"""With accumulate_steps=k, k updates equal one of the large batch."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions

from chainermn_comm import PeerError
from chainermn_train import create_multi_node_optimizer
from chainermn_train.accumulation import Accumulation
from chainermn_train.held import Held, HeldGradients

pytestmark = pytest.mark.world

BATCH, WIDTH = 5, 7
TOLERANCES = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-3}


class Net(chainer.Chain):
    def __init__(self, seed, n_in: int | None = WIDTH):
        super().__init__()
        np.random.seed(seed)
        with self.init_scope():
            self.first = L.Linear(n_in, 6)
            self.second = L.Linear(6, 2)
            self.scale = chainer.Parameter(np.ones((), chainer.config.dtype))

    def __call__(self, x):
        return F.mean(self.second(F.tanh(self.first(x))) ** 2) * self.scale


def batch(*seed):
    random = np.random.RandomState(seed)
    return random.uniform(-1, 1, (BATCH, WIDTH)).astype(chainer.config.dtype)


def accumulating(comm, model, steps, make=lambda: chainer.optimizers.MomentumSGD(lr=0.5), **kwds):
    return create_multi_node_optimizer(make(), comm, accumulate_steps=steps, **kwds).setup(model)


def large_steps(model, groups, make=lambda: chainer.optimizers.MomentumSGD(lr=0.5)):
    """One process that steps once along the gradient of each group's examples."""
    optimizer = make().setup(model)
    for group in groups:
        optimizer.update(model, np.concatenate(group))
    return optimizer


def assert_close(model, expected, tolerance):
    others = dict(expected.namedparams())
    for name, param in model.namedparams():
        assert param.dtype == others[name].dtype
        np.testing.assert_allclose(param.array, others[name].array, rtol=0, atol=tolerance)


def assert_same_bits(comm, model):
    mine = {name: param.array.tobytes() for name, param in model.namedparams()}
    assert all(others == mine for others in comm.allgather_obj(mine))


@pytest.fixture
def exchanges(monkeypatch):
    """How often gradients were exchanged; call it with a communicator first."""
    counted = []

    def count(comm):
        real = comm.multi_node_mean_grad

        def counting(*args):
            counted.append(args)
            real(*args)

        monkeypatch.setattr(comm, "multi_node_mean_grad", counting)
        return counted

    return count


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("steps", "updates"), [(1, 2), (2, 4), (3, 7), (4, 6)])
def test_it_equals_the_large_batch_a_partial_last_group_included(
    comm, exchanges, steps, updates, dtype
):
    exchanged = exchanges(comm)
    with chainer.using_config("dtype", np.dtype(dtype)):
        model, expected = Net(comm.rank), Net(0)
        optimizer = accumulating(comm, model, steps)
        for number in range(updates):
            optimizer.update(model, batch(comm.rank, number))
            assert optimizer.t == len(exchanged) == (number + 1) // steps
        optimizer.flush()
        optimizer.flush()
        groups = [
            [batch(rank, n) for rank in range(comm.size) for n in range(updates)[start:][:steps]]
            for start in range(0, updates, steps)
        ]
        large_steps(expected, groups)
        assert optimizer.t == len(exchanged) == len(groups)
        assert_close(model, expected, TOLERANCES[dtype])
        assert_same_bits(comm, model)


@pytest.mark.sizes(2, 3, 4)
def test_a_last_group_with_more_updates_on_some_ranks_counts_each_once(comm):
    """Rank r has r updates left."""
    with chainer.using_config("dtype", np.dtype("float64")):
        model, expected = Net(0), Net(0)
        optimizer = accumulating(comm, model, 6)
        optimizer._shared.broadcast(model)
        optimizer.assume_synchronized()
        optimizer.update(model, batch(comm.rank, 0))  # the first of a group is collective
        for number in range(comm.rank):
            optimizer.update(model, batch(comm.rank, number + 1))
        optimizer.flush()
        large_steps(
            expected, [[batch(rank, n) for rank in range(comm.size) for n in range(rank + 1)]]
        )
        assert optimizer.t == 1
        assert_close(model, expected, 1e-12)


def test_sixteen_bit_gradients_are_added_in_float32(naive):
    """Their sum would be infinite, their mean is not."""
    with chainer.using_config("dtype", np.dtype("float16")):
        model = Net(0)
        optimizer = accumulating(naive, model, 4, lambda: chainer.optimizers.SGD(lr=2.0**-10))
        optimizer.assume_synchronized()
        model.first.b.array[...] = 0
        for _ in range(4):
            model.cleargrads()
            model.first.b.grad = np.full(6, 40000, np.float16)
            optimizer.update()
        assert optimizer.t == 1
        np.testing.assert_array_equal(
            model.first.b.array, -np.full(6, 40000, np.float16) * np.float16(2.0**-10)
        )


def test_a_rank_without_examples_counts_as_zeros(comm):
    with chainer.using_config("dtype", np.dtype("float64")):
        model, expected = Net(0), Net(0)
        optimizer = accumulating(comm, model, 3, lambda: chainer.optimizers.SGD(lr=0.5))
        optimizer.assume_synchronized()
        for number in range(3):
            if comm.rank == comm.size - 1:
                model.cleargrads()
                optimizer.update()
            else:
                optimizer.update(model, batch(comm.rank, number))
        busy = comm.size - 1
        if busy:
            single = chainer.optimizers.SGD(lr=0.5 * busy / comm.size).setup(expected)
            single.update(
                expected, np.concatenate([batch(r, n) for r in range(busy) for n in range(3)])
            )
        assert optimizer.t == 1
        assert_close(model, expected, 1e-12)


def test_the_loss_scale_may_change_in_the_middle_of_a_group(comm):
    with chainer.using_config("dtype", np.dtype("float64")):
        model, expected = Net(0), Net(0)
        optimizer = accumulating(comm, model, 3)
        for number, scale in enumerate((8.0, 512.0, 0.25)):
            optimizer.set_loss_scale(scale)
            optimizer.update(model, batch(comm.rank, number))
        large_steps(expected, [[batch(r, n) for r in range(comm.size) for n in range(3)]])
        assert_close(model, expected, 1e-12)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_batch_whose_loss_fails_is_left_out(comm, failing):
    """The first and the last update of a group fail on all ranks, one between on its own."""

    def fail(x):
        raise FloatingPointError("bad batch")

    with chainer.using_config("dtype", np.dtype("float64")):
        model, expected = Net(comm.rank), Net(0)
        optimizer = accumulating(comm, model, 3)
        alone = failing == 1
        used = []
        number = 0
        while optimizer.t == 0:
            if number != failing:
                optimizer.update(model, batch(comm.rank, number))
                used += [(rank, number) for rank in range(comm.size)]
            elif comm.rank == 0:
                with pytest.raises(FloatingPointError, match="bad batch"):
                    optimizer.update(fail, batch(comm.rank, number))
            elif alone:
                optimizer.update(model, batch(comm.rank, number))
            else:
                with pytest.raises(PeerError, match="rank 0: FloatingPointError: bad batch"):
                    optimizer.update(model, batch(comm.rank, number))
            number += 1
        if alone:
            used += [(rank, failing) for rank in range(1, comm.size)]
        assert number == (3 if alone else 4)
        large_steps(expected, [[batch(*each) for each in used]])
        assert_close(model, expected, 1e-12)
        assert comm.allgather_obj(number) == [number] * comm.size


def test_a_group_in_which_every_batch_fails_makes_no_step(comm):
    def fail(x):
        raise FloatingPointError("bad batch")

    model = Net(comm.rank)
    optimizer = accumulating(comm, model, 4)
    optimizer.update(model, batch(comm.rank, 0))
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            optimizer.update(fail, batch(comm.rank, 0))
    optimizer.update(model, batch(comm.rank, 0))
    assert optimizer.t == 1


def test_lazily_initialised_links_lose_one_update(comm):
    with chainer.using_config("dtype", np.dtype("float64")):
        model = Net(comm.rank, None)
        optimizer = accumulating(comm, model, 3)
        for number in range(4):
            assert optimizer.t == 0
            optimizer.update(model, batch(comm.rank, number))
        assert optimizer.t == 1
        assert_same_bits(comm, model)


@pytest.mark.parametrize("steps", [2, 3])
def test_a_link_that_is_added_in_the_middle_of_a_group_is_broadcast(comm, steps):
    model = Net(comm.rank)
    optimizer = accumulating(comm, model, steps)
    optimizer.update(model, batch(comm.rank, 0))
    np.random.seed(comm.rank)
    with model.init_scope():
        model.more = L.Linear(2, 2)
    for param in model.more.params():
        param.update_rule = optimizer.create_update_rule()
    for number in range(1, steps):
        optimizer.update(model, batch(comm.rank, number))
    assert optimizer.t == 1
    assert_same_bits(comm, model)


def test_with_double_buffering_each_group_is_one_group_stale(comm):
    with chainer.using_config("dtype", np.dtype("float64")):
        model, expected = Net(comm.rank), Net(0)
        optimizer = accumulating(comm, model, 2, double_buffering=True)
        single = chainer.optimizers.MomentumSGD(lr=0.5).setup(expected)
        before = None
        for group in range(4):
            for number in range(2):
                optimizer.update(model, batch(comm.rank, group, number))
            expected.cleargrads()
            x = [batch(rank, group, n) for rank in range(comm.size) for n in range(2)]
            expected(np.concatenate(x)).backward()
            now = {name: param.grad.copy() for name, param in expected.namedparams()}
            if before is not None:
                for name, param in expected.namedparams():
                    param.grad = before[name]
                single.update()
            before = now
            assert optimizer.t == group
            assert_close(model, expected, 1e-12)
        # What is in flight, and a group of one.
        optimizer.update(model, batch(comm.rank, 9, 0))
        optimizer.flush()
        assert optimizer.t == 5
        assert before is not None
        for name, param in expected.namedparams():
            param.grad = before[name]
        gradient = copy.deepcopy(expected)  # the update's gradients were of the older weights
        single.update()
        gradient.cleargrads()
        gradient(np.concatenate([batch(rank, 9, 0) for rank in range(comm.size)])).backward()
        for name, param in expected.namedparams():
            param.grad = dict(gradient.namedparams())[name].grad
        single.update()
        assert_close(model, expected, 1e-12)


# In a trainer; saving and loading.


def trainer_of(comm, model, optimizer, out, updates=10):
    examples = np.concatenate([batch(comm.rank, number) for number in range(5)])
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(examples), BATCH, shuffle=False
    )
    updater = training.StandardUpdater(iterator, optimizer)
    return training.Trainer(updater, (updates, "iteration"), out=str(out))


def test_in_a_trainer_with_a_flush_at_the_end_of_each_epoch(comm, tmp_path):
    """An epoch has 5 batches: groups of 2, 2 and 1."""
    with chainer.using_config("dtype", np.dtype("float64")):
        model, expected = Net(comm.rank), Net(0)
        optimizer = accumulating(comm, model, 2)
        trainer = trainer_of(comm, model, optimizer, tmp_path)
        trainer.extend(lambda _: optimizer.flush(), name="flush", trigger=(1, "epoch"))
        trainer.run()
        groups = [
            [batch(rank, n) for rank in range(comm.size) for n in numbers]
            for numbers in ((0, 1), (2, 3), (4,)) * 2
        ]
        large_steps(expected, groups)
        assert optimizer.t == 6
        assert_close(model, expected, 1e-12)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_resumed_in_the_middle_of_a_group_it_gives_the_same_bits(comm, tmp_path, double, dtype):
    with chainer.using_config("dtype", np.dtype(dtype)):

        def run(seed, resume=None):
            model = Net(seed)
            optimizer = accumulating(comm, model, 3, double_buffering=double)
            trainer = trainer_of(comm, model, optimizer, tmp_path)
            if resume is None:
                name = f"snapshot_{comm.rank}_{{.updater.iteration}}"
                trainer.extend(extensions.snapshot(filename=name), trigger=(1, "iteration"))
            else:
                path = tmp_path / f"snapshot_{comm.rank}_{resume}"
                chainer.serializers.load_npz(path, trainer)
            trainer.run()
            optimizer.flush()
            return {name: param.array.tobytes() for name, param in model.namedparams()}

        whole = run(comm.rank)
        for iteration in 1, 5, 9, 10:
            assert run(comm.rank + 20, iteration) == whole


def test_a_group_that_is_too_long_for_the_optimizer_is_refused(naive):
    optimizer = accumulating(naive, Net(0), 4)
    for _ in range(3):
        optimizer.update(optimizer.target, batch(0, 0))
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(optimizer)
    other = accumulating(naive, Net(0), 3)
    with pytest.raises(ValueError, match="gradients of 3 updates"):
        chainer.serializers.NpzDeserializer(serializer.target).load(other)


def test_sums_of_another_rank_are_refused(naive):
    optimizer = accumulating(naive, Net(0), 3)
    for calls in 1, 3:
        while optimizer._group.calls != calls % 3:
            optimizer.update(optimizer.target, batch(0, 0))
        serializer = chainer.serializers.DictionarySerializer()
        serializer.save(optimizer)
        name = "chainermn/group/size"
        assert serializer.target[name] == naive.size
        serializer.target[name] = np.asarray(naive.size + 1)
        other = accumulating(naive, Net(0), 3)
        load = chainer.serializers.NpzDeserializer(serializer.target).load
        if calls == 1:
            with pytest.raises(ValueError, match=f"rank {naive.rank} of {naive.size + 1} added"):
                load(other)
        else:  # after a step there is nothing that belongs to a rank
            load(other)
            assert other.t == 1
        for _ in range(2):
            optimizer.update(optimizer.target, batch(0, 0))


class ElsewhereArray(np.ndarray):
    """A double of a GPU's array: it doesn't mix with NumPy's."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **kwds):
        if any(type(each) is np.ndarray for each in (*inputs, *out)):
            raise TypeError("arrays on two devices")
        arrays = (each.view(np.ndarray) for each in inputs)
        if out:
            kwds["out"] = tuple(each.view(np.ndarray) for each in out)
        result = getattr(ufunc, method)(*arrays, **kwds)
        return out[0] if out else result.view(ElsewhereArray)


def test_sums_of_a_snapshot_go_to_the_device_of_the_gradients(monkeypatch):
    device = SimpleNamespace(send=lambda array: array.view(ElsewhereArray))
    monkeypatch.setattr(chainer.backend, "get_device_from_array", lambda _: device)

    def gradients():
        return HeldGradients({"/p": Held(None, np.ones(3, "f4").view(ElsewhereArray), None)})

    group, resumed = Accumulation(4), Accumulation(4)
    group.add(gradients())
    state = chainer.serializers.DictionarySerializer()
    group.serialize(state, 0, 1)
    on_host = {name: np.array(array) for name, array in state.target.items()}
    resumed.serialize(chainer.serializers.NpzDeserializer(on_host), 0, 1)
    assert type(resumed._sums["/p"].grad) is np.ndarray
    resumed.add(gradients())
    total = resumed._sums["/p"].grad
    assert isinstance(total, ElsewhereArray)
    assert total.tolist() == [2, 2, 2]


def test_copies_go_their_own_ways(comm):
    optimizer = accumulating(comm, Net(0), 2)
    optimizer.update(optimizer.target, batch(comm.rank, 0))
    twin = copy.deepcopy(optimizer)
    for each in optimizer, twin:
        each.update(each.target, batch(comm.rank, 1))
        assert each.t == 1
    assert_close(optimizer.target, twin.target, 0)

"""What tests of training share: parameters and states, iterators, trainers, time."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chainer import Link
from chainer.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator
from chainer.serializers import DictionarySerializer, NpzDeserializer
from chainer.training import StandardUpdater, Trainer, extensions
from numpy.testing import assert_allclose

from chainermn_train.optimizers import drift


def parameters(model: Link) -> dict[str, np.ndarray]:
    """Copies of the initialised parameters."""
    named = sorted(model.namedparams())
    return {name: param.array.copy() for name, param in named if param.is_initialized}


def float32_parameters(model: Link) -> dict[str, np.ndarray]:
    """Those that Chainer's update rules keep beside float16 ones; not copied."""
    rules = {name: param.update_rule for name, param in model.namedparams()}
    kept = {name: getattr(rule, "_fp32_param", None) for name, rule in rules.items()}
    return {name: param.array for name, param in kept.items() if param is not None}


def parameter_bits(model: Link) -> dict[str, bytes]:
    """The bits of the parameters, and of the float32 ones beside them."""
    found = {name: array.tobytes() for name, array in parameters(model).items()}
    return found | {
        f"{name} in float32": array.tobytes()
        for name, array in float32_parameters(model).items()
    }


def same_everywhere(comm, model: Link) -> bool:
    """Whether all ranks' parameters have the same bits (collective)."""
    mine = parameter_bits(model)
    return all(others == mine for others in comm.allgather_obj(mine))


def assert_near(model: Link, expected: Link, tolerance: float):
    """Assert that parameters differ by so much at most, and have the same dtypes."""
    others = dict(expected.namedparams())
    for name, param in model.namedparams():
        assert param.dtype == others[name].dtype
        assert_allclose(
            param.array, others[name].array, rtol=0, atol=tolerance, err_msg=name
        )


def state_of(thing) -> dict[str, Any]:
    """What a Chainer serializer saves of it."""
    serializer = DictionarySerializer()
    serializer.save(thing)
    return serializer.target


def load_state(thing, state: dict[str, Any]):
    NpzDeserializer(state).load(thing)


# The kinds of iterators that ranks share, and the communicators with which they are tested.


def serial(dataset, batch_size: int = 3, **options) -> SerialIterator:
    return SerialIterator(dataset, batch_size, **options)


def threads(dataset, batch_size: int = 3, **options) -> MultithreadIterator:
    return MultithreadIterator(dataset, batch_size, n_threads=2, **options)


def processes(dataset, batch_size: int = 3, **options) -> MultiprocessIterator:
    return MultiprocessIterator(dataset, batch_size, n_processes=1, **options)


# Not all pairs: what starts worker processes takes seconds.
every_kind = pytest.mark.parametrize(
    ("comm", "kind"),
    [
        pytest.param("naive", serial, marks=pytest.mark.ranks(2)),
        pytest.param("plain", serial, marks=pytest.mark.ranks(3)),
        pytest.param("naive", threads, marks=pytest.mark.ranks(3)),
        pytest.param("plain", processes, marks=pytest.mark.ranks(2)),
    ],
    indirect=["comm"],
)


def trainer_over(examples, batch: int, optimizer, stop, out: Path) -> Trainer:
    """A trainer over batches in order; `stop` is a trigger."""
    iterator = SerialIterator(examples, batch, shuffle=False)
    updater = StandardUpdater(iterator, optimizer)
    return Trainer(updater, stop, out=str(out))


def logged(trainer: Trainer, trigger=(1, "iteration")) -> list[dict[str, Any]]:
    """Run it; what a LogReport wrote down."""
    log = extensions.LogReport(trigger=trigger)
    trainer.extend(log)
    trainer.run()
    return log.log


def checksum_of_all(_, params: Sequence[Any], steps: int) -> int:
    """Return the checksum of all parts of these parameters, after so many steps."""
    value = steps
    for part in drift.parts_of(params):
        updates = getattr(part.param.update_rule, "t", 0)
        value = zlib.crc32(part.elements, (value + updates) & 0xFFFFFFFF)
    return value


@pytest.fixture(autouse=True)
def all_compared():
    """The detector of drift compares all in each update."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift.DriftDetector, "checksum", checksum_of_all)
        yield


class SimulatedTime:
    """The seconds that have passed on this rank; in place of `time.perf_counter`."""

    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float):
        self.now += seconds

"""Evaluators over ranks."""

from __future__ import annotations

import chainer
import numpy as np
from chainer import Variable
from chainer.iterators import SerialIterator

from .models import Loss, inputs, linear, training
from .table import case, each


def iterator(comm, counts=(4, 4)):
    """Of as many examples as the rank's number in `counts`."""
    rows = (
        np.arange(3.0 * counts[comm.rank], dtype=np.float32).reshape(-1, 3) + comm.rank
    )
    return SerialIterator(rows, 2, repeat=False, shuffle=False)


def evaluator(comm, **how):
    return chainer.training.extensions.Evaluator(iterator(comm, **how), Loss())


@case
def create_multi_node_evaluator(chainermn, comm):
    made = chainermn.create_multi_node_evaluator(evaluator(comm), comm)
    return made(), made(None)


@case
def create_multi_node_evaluator_of_unequal_ranks(chainermn, comm):
    made = chainermn.create_multi_node_evaluator(evaluator(comm, counts=(6, 2)), comm)
    return made()


@case
def create_multi_node_evaluator_of_short_batches(chainermn, comm):
    made = chainermn.create_multi_node_evaluator(evaluator(comm, counts=(3, 3)), comm)
    return made()


@case
def actual_evaluator_afterwards(chainermn, comm):
    """Patched by the old one, as its manual says."""
    actual = evaluator(comm)
    chainermn.create_multi_node_evaluator(actual, comm)
    return actual()


@case
def create_multi_node_evaluator_twice(chainermn, comm):
    once = chainermn.create_multi_node_evaluator(evaluator(comm), comm)
    return chainermn.create_multi_node_evaluator(once, comm)()


@case
def evaluator_attributes(chainermn, comm):
    actual = evaluator(comm)
    actual.name = "test"
    made = chainermn.create_multi_node_evaluator(actual, comm)
    return (
        made.name,
        made.default_name,
        made.trigger,
        made.priority,
        made.get_target("main") is not None,
    )


@case
def evaluator_in_a_trainer(chainermn, comm):
    trainer, model = training(chainermn, comm)
    actual = chainer.training.extensions.Evaluator(iterator(comm), model)
    trainer.extend(
        chainermn.create_multi_node_evaluator(actual, comm), trigger=(1, "iteration")
    )
    seen = []

    def look(each):
        seen.append(dict(each.observation))

    trainer.extend(look, name="see")
    trainer.run()
    return [sorted(each) for each in seen], seen[-1].get("validation/main/loss")


class Own(chainer.training.extensions.Evaluator):
    def evaluate(self):
        return {
            "own/value": float(len(self.get_iterator("main").dataset)),
            "own/one": 1,
        }


@case
def evaluator_of_a_class(chainermn, comm):
    made = chainermn.create_multi_node_evaluator(Own(iterator(comm), linear()), comm)
    return made.evaluate(), isinstance(made, Own)


@case
def evaluator_of_variables(chainermn, comm):
    class Kind(chainer.training.extensions.Evaluator):
        def evaluate(self):
            return {"a": Variable(np.array(1.5 + comm.rank, np.float32))}

    return chainermn.create_multi_node_evaluator(
        Kind(iterator(comm), linear()), comm
    ).evaluate()


# -- GenericMultiNodeEvaluator


def generic(chainermn):
    class Kind(chainermn.extensions.GenericMultiNodeEvaluator):
        def calc_local(self, x):
            return float(x.sum()), int(x.shape[0])

        def aggregate(self, results):
            return {"total": sum(total for total, _ in results), "all": [*results]}

    return Kind


def made(chainermn, comm, **how):
    return generic(chainermn)(comm, iterator(comm, counts=(3, 4)), linear(), **how)


@each(0, 1)
def generic_evaluator(chainermn, comm, root):
    return made(chainermn, comm, root=root)(None)


@case
def generic_evaluator_reports(chainermn, comm):
    """The old one says nothing to the reporter of its own."""
    observation = {}
    with chainer.Reporter().scope(observation):
        made(chainermn, comm)(None)
    return observation


@case
def generic_evaluator_of_converted_batches(chainermn, comm):
    seen = []

    class Kind(chainermn.extensions.GenericMultiNodeEvaluator):
        def calc_local(self, *args, **kwargs):
            seen.append((args, kwargs))
            return comm.rank

        def aggregate(self, results):
            return [*results]

    rows = [(row, np.int32(n)) for n, row in enumerate(inputs())]
    pairs = SerialIterator(rows, 2, repeat=False, shuffle=False)
    result = Kind(comm, pairs, linear())(None)
    dicts = [{"x": row} for row in inputs()]
    named = SerialIterator(dicts, 2, repeat=False, shuffle=False)
    return result, Kind(comm, named, linear())(None), seen


@case
def generic_evaluator_of_a_converter(chainermn, comm):
    def converter(batch, device):
        return np.stack(batch) * 10

    return made(chainermn, comm, converter=converter)(None)


@case
def generic_evaluator_without_methods(chainermn, comm):
    return chainermn.extensions.GenericMultiNodeEvaluator(
        comm, iterator(comm), linear()
    )(None)


@each("eval_hook", "eval_func", "progress_bar")
def generic_evaluator_with(chainermn, comm, name):
    seen = []

    def call(*args):
        seen.append(len(args))
        return 1.0, 1

    value = {"eval_hook": call, "eval_func": call, "progress_bar": False}[name]
    return made(chainermn, comm, **{name: value})(None), seen

"""The multi-node evaluator: each rank evaluates its own examples, and all ranks get the mean."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Mapping
from types import MethodType
from typing import Any

import chainer
import numpy as np
from chainer.dataset.convert import _call_converter
from chainer.training.extensions import Evaluator

from chainermn_comm import CommunicatorBase
from chainermn_comm.parts import part_entries

from ..collective_errors import (
    allgather_checked,
    mismatch_hint,
    raise_together,
    require_communicator,
)
from ..host_arrays import as_number, mean_of, to_host
from ..slots import Facts, facts_of, value_slots

# One rank's results: by name, a value and its weight, or None if the weight is unknown.
_Results = dict[str, tuple[Any, Any]]


def create_multi_node_evaluator(
    actual_evaluator: Any, communicator: CommunicatorBase
) -> Any:
    """Make an evaluator report the mean over all ranks' examples, on every rank (not collective).

    Its ``evaluate()`` becomes collective: all ranks must call it, or run trainers that
    do so at the same time. A rank without examples doesn't count, and doesn't call the
    original ``evaluate()``. A value that only some ranks report is the mean over these
    ranks.

    With Chainer's own ``evaluate``, each batch has its length as its weight, unless the
    model reports pairs (value, weight). So on any number of ranks the result is that of
    the whole data set, if each example is on one rank:
    ``scatter_dataset(..., force_equal_length=False)``. Otherwise examples that
    :func:`scatter_dataset` gives to two ranks count twice.

    With an ``evaluate`` of the user's own, a rank's result has as its weight the length
    of the data set of its ``'main'`` iterator. If no rank's main iterator has a
    ``dataset``, because the evaluator iterates by itself, all ranks have the same
    weight. In such a method, ``super().evaluate()`` gives the rank's own result, in
    which Chainer counts each batch equally.

    The first ``evaluate()`` compares the parameters of Chainer's evaluators between ranks,
    except for models that ranks hold in parts. If parameters differ, rank 0 warns.

    A mean has the type of the ranks' values: a float, a NumPy scalar or array on the
    host, or a variable, with the same dtype (float64 for integers).

    If ``evaluate()`` fails on one rank, this rank raises the error, and all others a
    :class:`~chainermn_comm.errors.PeerError`. A deep copy has the same communicator; a
    shallow copy evaluates as the original. Pickling the evaluator raises TypeError.

    Args:
        actual_evaluator: an instance of :class:`chainer.training.extensions.Evaluator`
            or a subclass, which may have its own ``evaluate``; or any other extension
            or object whose ``evaluate()`` returns a dict of numbers or arrays.
        communicator: the ranks that evaluate together.

    Returns:
        ``actual_evaluator`` itself, still an instance of its class.

    Warns:
        RuntimeWarning: on rank 0, at the first ``evaluate()``: the ranks' models differ, as
            they do without a multi-node optimizer.

    Raises:
        TypeError: an argument is no evaluator or no communicator, or the evaluator is
            already a multi-node evaluator.
        AttributeError: the evaluator takes no attributes, because its class has
            ``__slots__``.
    """
    communicator = require_communicator(communicator, "create_multi_node_evaluator")
    if is_multi_node_evaluator(actual_evaluator):
        raise TypeError(
            "the evaluator is already a multi-node evaluator; use it as it is"
        )
    evaluate = getattr(actual_evaluator, "evaluate", None)
    if not callable(evaluate):
        raise TypeError(
            "create_multi_node_evaluator needs a chainer.training.extensions.Evaluator, or another "
            f"object with evaluate(), not {type(actual_evaluator).__name__}"
        )
    # The function must return the same object, so it can't return a wrapper. A method in
    # the instance leaves the class as it is: `super()` and `isinstance` go on working.
    actual_evaluator._mn_communicator = communicator
    actual_evaluator._mn_evaluate = evaluate
    actual_evaluator._mn_compared = False
    actual_evaluator.evaluate = MethodType(_evaluate, actual_evaluator)
    return actual_evaluator


def is_multi_node_evaluator(extension: Any) -> bool:
    """Return whether :func:`create_multi_node_evaluator` has changed an extension."""
    return hasattr(extension, "_mn_communicator")


def _evaluate(evaluator: Any) -> dict[str, Any]:
    """Return the mean over all ranks of what ``evaluate`` returns on each (collective)."""
    communicator = evaluator._mn_communicator
    with mismatch_hint("a multi-node evaluator"):
        if not evaluator._mn_compared:
            evaluator._mn_compared = True
            _warn_of_different_models(evaluator, communicator)
        results = allgather_checked(
            communicator, "evaluate", lambda: _evaluate_here(evaluator)
        )
        return _mean(results)


def _warn_of_different_models(evaluator: Any, communicator: CommunicatorBase) -> None:
    """Warn on rank 0 if ranks have different values of a parameter (collective)."""
    rows = allgather_checked(communicator, "evaluate", lambda: _values_here(evaluator))
    for name in rows[0]:
        facts = {row.get(name) for row in rows}
        if None in facts or len(facts) == 1:
            continue
        # The warning may be an error, on rank 0 alone.
        with raise_together(communicator.handshake, "evaluate"):
            if communicator.rank == 0:
                warnings.warn(
                    f"a multi-node evaluator takes the mean over different models: {name} differs "
                    "between ranks. Train with create_multi_node_optimizer(optimizer, comm), "
                    "whose first update gives rank 0's model to all ranks; or call "
                    "comm.bcast_data(model)",
                    RuntimeWarning,
                    stacklevel=4,
                )
        return


def _values_here(evaluator: Any) -> Facts:
    """Return facts of the models' parameters, without models that ranks hold in parts."""
    facts: Facts = {}
    for target in getattr(evaluator, "get_all_targets", dict)().values():
        if not part_entries(target.namedparams()):
            facts |= facts_of(value_slots(target), with_checksums=True)
    return facts


def _evaluate_here(evaluator: Any) -> _Results:
    iterators: Any = getattr(evaluator, "get_all_iterators", dict)()
    weight = None
    dataset = getattr(iterators.get("main"), "dataset", None)
    if dataset is not None:
        weight = len(dataset)
    if weight == 0:
        return {}
    evaluate = evaluator._mn_evaluate
    if getattr(evaluate, "__func__", None) is Evaluator.evaluate:
        return _means_over_examples(evaluator)
    values = evaluate()
    if not isinstance(values, Mapping):
        raise TypeError(
            "the evaluator's evaluate() must return a dict of the values to report, not "
            f"{type(values).__name__}; is there a `return` missing?"
        )
    return {
        key: (as_number(key, value, "the evaluator"), weight)
        for key, value in values.items()
    }


def _means_over_examples(evaluator: Any) -> _Results:
    """Do what ``Evaluator.evaluate`` does, but let each batch count by its examples.

    Chainer's method runs on a copy, whose converter counts the examples of a batch, and
    whose function reports pairs (value, weight) for Chainer's summary.
    """
    function = evaluator.eval_func or evaluator.get_target("main")
    count = 0  # examples of the current batch
    weights: dict[str, Any] = defaultdict(int)

    @chainer.dataset.converter()
    def convert(batch: Any, device: Any) -> Any:
        nonlocal count
        count = len(batch)
        return _call_converter(evaluator.converter, batch, device)

    def evaluate_batch(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        observation = chainer.reporter.get_current_reporter().observation
        for key, value in list(observation.items()):
            weight = count
            if isinstance(value, tuple):  # the model reports a weight
                value, weight = map(to_host, value)
            if weight == 0:
                del observation[
                    key
                ]  # in one process such a batch doesn't count, either
            else:
                observation[key] = value, weight
                weights[key] += weight

    if evaluator.eval_hook:
        evaluator.eval_hook(evaluator)
    weighing = copy.copy(evaluator)
    weighing.eval_hook = None
    weighing.converter = convert
    weighing.eval_func = evaluate_batch
    means = to_host(Evaluator.evaluate(weighing))
    return {key: (mean, weights[key]) for key, mean in means.items()}


def _mean(ranks: list[_Results]) -> dict[str, Any]:
    """Return the weighted mean of each value.

    All ranks have the same list and add it up in the same order, so they get the same
    bits.
    """
    means = {}
    for key in dict.fromkeys(key for results in ranks for key in results):
        having = [results[key] for results in ranks if key in results]
        values, weights = map(list, zip(*having, strict=True))
        if None in weights:
            if any(weights):
                raise ValueError(
                    "the evaluator's main iterator has a data set on some ranks only, so results "
                    "cannot be weighted: give it one on all ranks or on none; numbers of examples "
                    f"of ranks that report {key!r}, in rank order: {weights}"
                )
            weights = [1] * len(values)
        shapes = [np.shape(value) for value in values]
        if len(set(shapes)) > 1:
            raise ValueError(
                f"the evaluator reports {key!r} in shapes that differ between ranks, so it has no "
                f"mean; in rank order: {shapes}"
            )
        means[key] = mean_of(values, weights)
    return means

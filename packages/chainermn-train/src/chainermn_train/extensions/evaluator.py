"""The multi-node evaluator: each rank evaluates its own examples, every rank gets the mean."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import chainer
import numpy as np
from chainer.dataset.convert import _call_converter
from chainer.training.extensions import Evaluator

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked, mismatch_hint, require_communicator
from ..host_arrays import as_number, mean_of, to_host
from ..wrappers import UnpicklableMixin

# A value of one rank, and its weight.
_Weighted = tuple[Any, Any]


def create_multi_node_evaluator(
    actual_evaluator: Any, communicator: CommunicatorBase
) -> Any:
    """Make an evaluator report the mean over all ranks' examples, on every rank.

    Its ``evaluate()`` becomes collective: all ranks must call it, or run trainers that
    do so at the same time. A rank without examples counts nothing, and the original
    ``evaluate()`` is not called there. A value that only some ranks report is the mean
    over those.

    Where ``evaluate`` is Chainer's own, each batch counts by its ``len()``, also one
    that is shorter than the others, unless the model reports a pair (value, weight). So
    the result is that of the whole data set, on any number of ranks, if each example is
    on one rank: ``scatter_dataset(..., force_equal_length=False)``. Examples that
    :func:`scatter_dataset` gives to two ranks, to make their parts equal, count twice.

    The result of an ``evaluate`` of the user's own counts as much as there are examples
    in the data set of the rank's ``'main'`` iterator. Where no rank's main iterator has
    a ``dataset`` (an evaluator class that iterates by itself), ranks count equally.
    ``super().evaluate()`` in it gives the rank's own result, in which Chainer counts
    each batch equally. A mean has the type that the ranks' values have: a float, a
    NumPy scalar or array on the host, or a variable, of the same dtype (float64 for
    integers).

    ``evaluate()`` raises on all ranks what fails on one of them: the error itself
    there, a :class:`~chainermn_comm.errors.PeerError` that names the rank on the
    others. Copies of the evaluator, shallow or deep, have the same communicator; it
    can't be pickled (TypeError).

    Args:
        actual_evaluator: an instance of :class:`chainer.training.extensions.Evaluator`
            or a subclass, which may have its own ``evaluate``; or any other extension
            or object whose ``evaluate()`` returns a dict of numbers or arrays.
        communicator: the ranks that evaluate together.

    Returns:
        ``actual_evaluator`` itself, changed as above and still an instance of its
        class.

    Raises:
        TypeError: an argument is not an evaluator or not a communicator, or the
            evaluator is a multi-node evaluator already, or of a class whose instances
            have no ``__dict__``.
    """
    communicator = require_communicator(communicator, "create_multi_node_evaluator")
    if "_mn_communicator" in getattr(actual_evaluator, "__dict__", ()):
        raise TypeError(
            "the evaluator is already a multi-node evaluator; use it as it is"
        )
    evaluate = getattr(actual_evaluator, "evaluate", None)
    if not callable(evaluate):
        raise TypeError(
            "create_multi_node_evaluator needs a chainer.training.extensions.Evaluator, or another "
            f"object with evaluate(), not {type(actual_evaluator).__name__}"
        )
    if not hasattr(actual_evaluator, "__dict__"):
        raise TypeError(
            f"a {type(actual_evaluator).__name__} can't become a multi-node evaluator, since its "
            "class has __slots__ and no __dict__; derive a class from it without __slots__"
        )
    # The same object has to come back, so composition is out. A subclass made for the
    # evaluator's own class, under the same name, rather than a method put into the
    # instance: `super()`, copies (see wrappers.py) and `isinstance` all go on working.
    cls = type(actual_evaluator)
    # Not by assignments, which a mock, or a class with `__setattr__`, takes for
    # something else.
    vars(object)["__class__"].__set__(actual_evaluator, _multi_node_class(cls))
    # A function that was put into the instance would go before the subclass's.
    in_class = None if hasattr(cls, "evaluate") else evaluate
    own = vars(actual_evaluator)
    own.update(
        _mn_evaluate=own.pop("evaluate", in_class), _mn_communicator=communicator
    )
    return actual_evaluator


def _multi_node_class(cls: Any) -> Any:
    """Return a subclass, of the same name, whose ``evaluate`` calls the class's on each rank.

    Instances can change to it, since it has one base and adds no slots.
    ``_mn_evaluate`` of an instance, if it isn't None, goes before the class's.
    """

    def evaluate(self: Any) -> dict[str, Any]:
        """Return the mean over all ranks of what ``evaluate`` returns on each (collective)."""
        get_iterators: Callable[[], Any] = getattr(self, "get_all_iterators", dict)
        of_instance = vars(self)["_mn_evaluate"]

        def evaluate_here() -> tuple[bool, dict[str, _Weighted]]:
            iterators = get_iterators()  # a mock makes another one
            main = iterators.get("main") if isinstance(iterators, Mapping) else None
            dataset = getattr(main, "dataset", None)
            if dataset is not None and len(dataset) == 0:
                return True, {}
            if of_instance is None and cls.evaluate is Evaluator.evaluate:
                return True, _means_over_examples(self)
            values = _checked((of_instance or super(multi_node, self).evaluate)())
            weight = 1 if dataset is None else len(dataset)
            return dataset is not None, {
                key: (value, weight) for key, value in values.items()
            }

        with mismatch_hint("a multi-node evaluator"):
            communicator = vars(self)["_mn_communicator"]
            return _mean(allgather_checked(communicator, "evaluate", evaluate_here))

    about = {
        name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")
    }
    copied = {
        name: value for name, value in vars(UnpicklableMixin).items() if callable(value)
    }
    members = {**copied, **about, "__slots__": (), "evaluate": evaluate}
    multi_node: Any = type(cls.__name__, (cls,), members)
    return multi_node


def _checked(result: Any) -> dict[str, Any]:
    """Return the result of one rank's ``evaluate`` as values that have a mean."""
    if not isinstance(result, Mapping):
        kind = "None" if result is None else type(result).__name__
        raise TypeError(
            "the evaluator's evaluate() must return a dict of the values to report, not "
            f"{kind}; is there a `return` missing?"
        )
    return {
        key: as_number(key, value, "the evaluator") for key, value in result.items()
    }


def _means_over_examples(evaluator: Any) -> dict[str, _Weighted]:
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
        # An iterator of the user's own may give what has no length.
        count = len(batch) if hasattr(batch, "__len__") else 1
        return _call_converter(evaluator.converter, batch, device)

    def evaluate_batch(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)
        observation = chainer.reporter.get_current_reporter().observation
        for key, value in list(observation.items()):
            weight = count
            if isinstance(value, tuple):  # the model reports a weight of its own
                value, weight = map(to_host, value)
            if weight == 0:
                del observation[key]  # one process would count other batches only
            else:
                observation[key] = value, weight
                weights[key] += weight

    if evaluator.eval_hook:
        evaluator.eval_hook(evaluator)
    weighing = copy.copy(evaluator)
    weighing.eval_hook = None
    weighing.converter = convert
    weighing.eval_func = evaluate_batch
    means = Evaluator.evaluate(weighing)
    return {key: (to_host(mean), weights[key]) for key, mean in means.items()}


def _mean(results: list[tuple[bool, dict[str, _Weighted]]]) -> dict[str, Any]:
    """Return the weighted mean of each key; each rank says whether its weights are known.

    All ranks have the same list and add it up in the same order, so they get the same
    bits.
    """
    unknown = [rank for rank, (is_known, _) in enumerate(results) if not is_known]
    if unknown and len(unknown) < len(results):
        raise ValueError(
            f"the evaluator's main iterator has no data set on ranks {unknown}, but has one on "
            "the others: results cannot be weighted; give it one on all ranks or on none"
        )
    means = {}
    for key in dict.fromkeys(key for _, values in results for key in values):
        having = [rank for rank, (_, values) in enumerate(results) if key in values]
        terms, weights = zip(*(results[rank][1][key] for rank in having), strict=True)
        shapes = list(map(np.shape, terms))
        if len(set(shapes)) > 1:
            views = [
                f"{shape} on rank {r}" for r, shape in zip(having, shapes, strict=True)
            ]
            raise ValueError(
                f"the evaluator reports {key!r} in shapes that differ between ranks, so it has no "
                f"mean: {', '.join(views)}"
            )
        means[key] = mean_of(terms, weights)
    return means

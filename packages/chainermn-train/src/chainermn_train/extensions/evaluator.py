"""The multi-node evaluator: each rank evaluates its own examples, every rank gets the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from chainermn_comm import CommunicatorBase

from ..collective_errors import allgather_checked, mismatch_hint, require_communicator
from ..host_arrays import as_number, mean_of
from ..wrappers import UnpicklableMixin


def create_multi_node_evaluator(
    actual_evaluator: Any, communicator: CommunicatorBase
) -> Any:
    """Make an evaluator report the mean over all ranks' examples, on every rank.

    Its ``evaluate()`` becomes collective: all ranks must call it, or run trainers that
    do so at the same time. Each rank's result counts as much as the number of examples
    in the data set of its ``'main'`` iterator. A rank without examples counts nothing,
    and the original ``evaluate()`` is not called there. Where no rank's main iterator
    has a ``dataset`` (an evaluator class that iterates by itself), ranks count equally.
    A value that only some ranks report is the mean over those. It has the type that the
    ranks' values have: a float, a NumPy scalar or array on the host, or a variable, of
    the same dtype (float64 for integers).

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
        own = vars(self)["_mn_evaluate"] or super(multi_node, self).evaluate

        def evaluate_here() -> tuple[int | None, dict[str, Any]]:
            iterators = get_iterators()  # a mock makes another one
            main = iterators.get("main") if isinstance(iterators, Mapping) else None
            dataset = getattr(main, "dataset", None)
            count = None if dataset is None else len(dataset)
            return count, {} if count == 0 else _checked(own())

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


def _mean(results: list[tuple[int | None, dict[str, Any]]]) -> dict[str, Any]:
    """Return the mean of each key, weighted by the ranks' numbers of examples, if there are any.

    All ranks have the same list and add it up in the same order, so they get the same
    bits.
    """
    unknown = [rank for rank, (count, _) in enumerate(results) if count is None]
    if unknown and len(unknown) < len(results):
        raise ValueError(
            f"the evaluator's main iterator has no data set on ranks {unknown}, but has one on "
            "the others: results cannot be weighted; give it one on all ranks or on none"
        )
    means = {}
    for key in dict.fromkeys(key for _, values in results for key in values):
        having = [rank for rank, (_, values) in enumerate(results) if key in values]
        counts, terms = zip(
            *((results[r][0], results[r][1][key]) for r in having), strict=True
        )
        shapes = list(map(np.shape, terms))
        if len(set(shapes)) > 1:
            views = [
                f"{shape} on rank {r}" for r, shape in zip(having, shapes, strict=True)
            ]
            raise ValueError(
                f"the evaluator reports {key!r} in shapes that differ between ranks, so it has no "
                f"mean: {', '.join(views)}"
            )
        means[key] = mean_of(terms, [1 if count is None else count for count in counts])
    return means

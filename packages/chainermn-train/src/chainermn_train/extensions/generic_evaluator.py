"""The evaluator for metrics that are not means: one rank gathers the outputs of all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import chainer
import numpy as np
from chainer.dataset import concat_examples
from chainer.dataset.convert import _call_converter
from chainer.training.extensions import Evaluator

from chainermn_comm import CommunicatorBase

from ..collective_errors import (
    bcast_checked,
    raise_together,
    require_communicator,
    require_integer,
)
from ..host_arrays import to_host

_OPERATION = "GenericMultiNodeEvaluator"


class GenericMultiNodeEvaluator(Evaluator):
    """Evaluates a model on all ranks' examples with a metric that needs all outputs at once.

    The evaluator is for metrics that can't be averaged over ranks, such as the area
    under a curve. Override :meth:`calc_local`, which computes a rank's result of one
    batch, and :meth:`aggregate`, which combines all ranks' results on one rank::

        class Auc(GenericMultiNodeEvaluator):
            def calc_local(self, x, t):
                return self.target(x).array[:, 1], t

            def aggregate(self, results):
                score, truth = map(np.concatenate, zip(*results))
                return {"auc": roc_auc_score(truth, score)}

    A rank holds the results of all its batches until its last batch, and then ``root``
    holds the results of all ranks. So ``calc_local`` should return no more than
    ``aggregate`` needs. Ranks may have different numbers of examples, or none.

    If ``aggregate`` returns a dict, each number or array in it is also reported on all
    ranks, as ``<name of the extension>/<key>``. Values that the model itself reports
    are dropped.

    Calling the extension is collective, so its trigger must fire on all ranks at the
    same time. By default it runs once per epoch, with the name ``validation``.

    Args:
        comm: the ranks.
        iterator: the iterator over this rank's examples, with ``repeat=False``.
        target: the model or function that the default ``calc_local`` calls. A subclass
            may use it for anything.
        device: the device to which the converter moves batches; None to leave them
            where they are.
        converter: turns a batch of examples into arrays.
        root: the rank that aggregates; the same on all ranks.
        progress_hook: called on ``root`` after each of its own batches with the batch,
            a list of examples.

    Raises:
        TypeError: ``comm`` is no communicator, ``iterator`` no iterator, or ``root`` no
            integer.
        ValueError: there is no rank ``root``, or the iterator repeats without end.
    """

    def __init__(
        self,
        comm: CommunicatorBase,
        iterator: Any,
        target: Any,
        device: Any = None,
        converter: Callable[..., Any] = concat_examples,
        root: int = 0,
        *,
        progress_hook: Callable[[Any], Any] | None = None,
    ) -> None:
        comm = require_communicator(comm, "GenericMultiNodeEvaluator")
        if not hasattr(iterator, "__next__"):
            raise TypeError(
                f"iterator must be an iterator, not {type(iterator).__name__}"
            )
        if getattr(iterator, "repeat", False):
            raise ValueError("the iterator never ends; make it with repeat=False")
        super().__init__({"main": iterator}, {"main": target}, converter, device)
        self.comm = comm
        self.iterator = iterator
        self.target = target
        self.root = require_integer("root", root, 0, comm.size - 1)
        self._progress_hook = progress_hook

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's result of one batch; the default returns what ``target`` returns.

        Subclasses may override the method. It is called without recording graphs, and
        with ``chainer.config.train`` False.

        Args:
            args: the arrays of the batch, if the converter returns a tuple.
            kwargs: the arrays of the batch, if the converter returns a dict.

        Returns:
            Any picklable object; ``aggregate`` gets a copy.
        """
        return self.target(*args, **kwargs)

    def aggregate(self, results: list[Any]) -> Any:
        """Combine all ranks' results at ``root``; the default returns them.

        Subclasses may override the method. It is called once, on ``root`` only.

        Args:
            results: the results of ``calc_local`` for the first batch of each rank, in
                rank order, then for each rank's second batch, and so on.
        """
        return results

    def __call__(self, trainer: Any = None) -> Any:
        """Evaluate, report the numbers in the result if it is a dict, and return it (collective).

        ``trainer`` is not used.

        Returns:
            What ``aggregate`` returns on ``root``, and None on the other ranks.

        Raises:
            BaseException: the error of this rank (PeerError on the other ranks).
            RankMismatchError: ranks have different ``root``; raised on all ranks.
        """
        result = self._aggregate_at_root()
        numbers = bcast_checked(
            self.comm, _OPERATION, lambda: _numbers(result), self.root
        )
        if self.name is not None:
            numbers = {f"{self.name}/{key}": value for key, value in numbers.items()}
        chainer.report(numbers)
        return result

    def evaluate(self) -> Any:
        """Return on all ranks what ``aggregate`` returns (collective); raise as a call does.

        The result must be picklable. Variables and GPU arrays in it, also inside tuples,
        lists and dicts, become NumPy arrays on all ranks.
        """
        result = self._aggregate_at_root()
        return bcast_checked(self.comm, _OPERATION, lambda: to_host(result), self.root)

    def _aggregate_at_root(self) -> Any:
        with raise_together(self.comm.handshake, _OPERATION) as call:
            call.signature = (("root", self.root),)
            content = pickle.dumps(self._results_here(), protocol=5)
        gathered = self.comm.gather_obj(content, root=self.root)
        with raise_together(self.comm.handshake, _OPERATION):
            if gathered is None:
                return None
            ranks = list(map(pickle.loads, gathered))
            results = [
                rank[batch]
                for batch in range(max(map(len, ranks)))
                for rank in ranks
                if batch < len(rank)
            ]
            return self.aggregate(results)

    def _results_here(self) -> list[Any]:
        """Return what ``calc_local`` returns for each of this rank's batches."""
        results: list[Any] = []
        dataset = getattr(self.iterator, "dataset", None)
        if dataset is not None and len(dataset) == 0:
            return results
        current: Any = None

        @chainer.dataset.converter()
        def convert(batch: Any, device: Any) -> Any:
            nonlocal current
            current = batch
            return _call_converter(self.converter, batch, device)

        def calculate(*args: Any, **kwargs: Any) -> None:
            results.append(self.calc_local(*args, **kwargs))
            if self._progress_hook is not None and self.comm.rank == self.root:
                self._progress_hook(current)

        targets = {}
        if isinstance(self.target, chainer.Link):
            targets["main"] = self.target
        evaluate = Evaluator(
            {"main": self.iterator}, targets, convert, self.device, eval_func=calculate
        )
        # Without a reporter of its own the model would report among the training's values.
        with chainer.Reporter():
            evaluate()
        return results


def _numbers(result: Any) -> dict[str, Any]:
    """Return the numbers and arrays in the result, if it is a dict."""
    if not isinstance(result, Mapping):
        return {}
    kinds = (Number, np.bool_, np.ndarray)
    return {
        key: host for key in result if isinstance(host := to_host(result[key]), kinds)
    }

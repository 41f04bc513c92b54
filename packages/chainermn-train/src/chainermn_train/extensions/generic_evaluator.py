"""The evaluator for metrics that are not means: all ranks' outputs are gathered on one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from numbers import Number
from typing import Any

import chainer
import numpy as np
from chainer import training
from chainer.dataset import concat_examples
from chainer.dataset.convert import _call_converter

from chainermn_comm import CommunicatorBase

from ..collective_errors import (
    bcast_checked,
    raise_together,
    require_communicator,
    require_integer,
)
from ..host_arrays import to_host

_OPERATION = "GenericMultiNodeEvaluator"
_HAS_BATCH = b"1"


class GenericMultiNodeEvaluator(training.Extension):
    """Evaluates a model on all ranks' examples with a metric that needs all outputs at once.

    For metrics such as the area under a curve, which can't be averaged over ranks. Override
    :meth:`calc_local`, what a rank makes of one batch, and :meth:`aggregate`, what one rank
    makes of all ranks' results::

        class Auc(GenericMultiNodeEvaluator):
            def calc_local(self, x, t):
                return self.target(x).array[:, 1], t

            def aggregate(self, results):
                score, truth = map(np.concatenate, zip(*results))
                return {"auc": roc_auc_score(truth, score)}

    Results are sent batch by batch. A rank other than ``root`` holds no more than one;
    ``root`` holds those of all batches of all ranks at once, so return no more from
    ``calc_local`` than ``aggregate`` needs. Ranks may have different numbers of
    examples, or none.

    If ``aggregate`` returns a dict, each number or array in it is also reported on all
    ranks, as ``<name of the extension>/<key>``. What the model itself reports is not.

    Calling it is collective: its trigger has to fire on all ranks at the same time. By
    default that is once an epoch, under the name ``validation``.

    Args:
        comm: the ranks.
        iterator: the iterator over this rank's examples, with ``repeat=False``.
        target: the model, or any function, that the default ``calc_local`` calls. A
            class with a ``calc_local`` of its own may use it for anything.
        device: where the converter puts the batches; None to leave them.
        converter: makes a batch of examples arrays.
        root: the rank that aggregates; the same on all ranks.
        progress_hook: called on ``root`` after each of its own batches with the batch,
            a list of examples.

    Raises:
        TypeError: ``comm`` is not a communicator, ``iterator`` not an iterator, or
            ``root`` not an integer.
        ValueError: there is no rank ``root``, or the iterator repeats without end.
    """

    trigger = (1, "epoch")
    default_name = "validation"
    priority = training.PRIORITY_WRITER

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
        if getattr(iterator, "repeat", getattr(iterator, "_repeat", False)):
            raise ValueError("the iterator never ends; make it with repeat=False")
        self.comm = comm
        self.iterator = iterator
        self.target = target
        self.device = None
        if device is not None:
            self.device = chainer.get_device(device)
        self.converter = converter
        self.root = require_integer("root", root, 0, comm.size - 1)
        self._progress_hook = progress_hook

    @property
    def _targets(self) -> dict[str, Any]:
        """Where subclasses that were written for Chainer 7 find the model."""
        return {"main": self.target}

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's result of one batch; override it. By default what ``target`` returns.

        It is called without recording graphs, and with ``chainer.config.train`` False.

        Args:
            args: the arrays of the batch, as the converter returns them.
            kwargs: the same, where the converter returns a dict.

        Returns:
            Any picklable object; ``aggregate`` gets a copy.
        """
        return self.target(*args, **kwargs)

    def aggregate(self, results: list[Any]) -> Any:
        """Combine all ranks' results at ``root``; override it. By default it returns them.

        Called once, on ``root`` only.

        Args:
            results: what ``calc_local`` returned for the first batch of each rank that
                has one, in rank order, then for the second batches, and so on.
        """
        return results

    def __call__(self, trainer: Any = None) -> Any:
        """Evaluate, report the numbers in the result if it is a dict, and return it (collective).

        ``trainer`` is not used.

        Returns:
            What ``aggregate`` returns on ``root``, and None on the other ranks.

        Raises:
            BaseException: whatever failed on this rank (PeerError, which names it, on
                the others).
            RankMismatchError: on all ranks, when they were given different ``root``.
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

        It has to be picklable. Variables and GPU arrays in it (or in tuples, lists and
        dicts in it) are NumPy arrays on all ranks.
        """
        result = self._aggregate_at_root()
        return bcast_checked(self.comm, _OPERATION, lambda: to_host(result), self.root)

    def _aggregate_at_root(self) -> Any:
        self.comm.handshake(_OPERATION, (("root", self.root),))
        batches = self._batches()
        results: list[Any] = []
        # On root: the pickled results of a batch of each rank.
        gathered: list[bytes | None] = []
        while True:
            with raise_together(self.comm.handshake, _OPERATION) as call:
                present = [each for each in gathered if each is not None]
                results += map(pickle.loads, present)
                content = None
                batch = next(batches, None)
                if batch is not None:
                    content = pickle.dumps(self._result_of(batch), protocol=5)
                    call.payload = _HAS_BATCH
            if not any(call.payloads):
                break
            gathered = self.comm.gather_obj(content, root=self.root) or []
        with raise_together(self.comm.handshake, _OPERATION):
            if self.comm.rank == self.root:
                return self.aggregate(results)
            return None

    def _batches(self) -> Iterator[Any]:
        """Return an iterator over this rank's batches which have examples."""
        iterator = self.iterator
        if hasattr(iterator, "reset"):
            iterator.reset()
        else:
            iterator = copy.copy(iterator)
        dataset = getattr(iterator, "dataset", None)
        if dataset is not None and len(dataset) == 0:
            return iter(())
        return filter(len, iterator)

    def _result_of(self, batch: Any) -> Any:
        """Return what ``calc_local`` makes of a batch."""
        # Else the model would report into the training's values.
        reporter = chainer.Reporter()
        if isinstance(self.target, chainer.Link):
            reporter.add_observer("main", self.target)
            reporter.add_observers("main", self.target.namedlinks(skipself=True))
        arrays = _call_converter(self.converter, batch, self.device)
        with (
            reporter,
            chainer.using_config("train", False),
            chainer.no_backprop_mode(),
        ):
            if isinstance(arrays, tuple):
                output = self.calc_local(*arrays)
            elif isinstance(arrays, dict):
                output = self.calc_local(**arrays)
            else:
                output = self.calc_local(arrays)
        if self._progress_hook is not None and self.comm.rank == self.root:
            self._progress_hook(batch)
        return output

    def finalize(self) -> None:
        """Release what the iterator holds."""
        if hasattr(self.iterator, "finalize"):
            self.iterator.finalize()


def _numbers(result: Any) -> dict[str, Any]:
    """Return what is a number or an array in the result, if that is a dict."""
    if not isinstance(result, Mapping):
        return {}
    kinds = (Number, np.bool_, np.ndarray)
    return {
        key: host for key in result if isinstance(host := to_host(result[key]), kinds)
    }

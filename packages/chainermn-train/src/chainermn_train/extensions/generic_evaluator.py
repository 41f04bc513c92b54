"""The evaluator for metrics that are not means: all ranks' outputs are gathered on one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import chain
from typing import Any

import chainer
from chainer import training
from chainer.dataset import concat_examples
from chainer.dataset.convert import _call_converter

from chainermn_comm import CommunicatorBase

from ..collective_errors import SharedFailure, bcast_checked, require_communicator, require_integer
from ..host_arrays import to_host
from ..wrappers import UnpicklableMixin

_OPERATION = "GenericMultiNodeEvaluator"
_HAS_BATCH = b"1"


class GenericMultiNodeEvaluator(UnpicklableMixin, training.Extension):
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

    Results are sent batch by batch. A rank other than ``root`` holds no more than one; nor
    does ``root`` hold more than one of each rank, unless ``aggregate`` keeps them. Ranks may
    have different numbers of examples, or none.

    All ranks get what ``aggregate`` returns. If that is a dict, each entry is also reported
    on all ranks, as ``<name of the extension>/<key>``. What the model itself reports is not.

    Calling it is collective: its trigger has to fire on all ranks at the same time. By
    default that is once an epoch, under the name ``validation``.

    Args:
        comm: the ranks.
        iterator: the iterator over this rank's examples, with ``repeat=False``.
        target: the model, or any function, that the default ``calc_local`` calls.
        device: where the converter puts the batches; None to leave them.
        converter: makes a batch of examples arrays.
        root: the rank that aggregates; the same on all ranks.

    Raises:
        TypeError: ``comm`` is not a communicator, ``iterator`` not an iterator, ``root`` not an
            integer, or ``target`` can't be called.
        ValueError: there is no rank ``root``, or the iterator repeats without end.
    """

    trigger = (1, "epoch")
    default_name = "validation"
    priority = training.PRIORITY_WRITER

    def __init__(
        self,
        comm: CommunicatorBase,
        iterator: Any,
        target: Callable[..., Any],
        device: Any = None,
        converter: Callable[..., Any] = concat_examples,
        root: int = 0,
    ) -> None:
        comm = require_communicator(comm, "GenericMultiNodeEvaluator")
        if not callable(target):
            raise TypeError(f"target must be a model or a function, not {type(target).__name__}")
        if not hasattr(iterator, "__next__"):
            raise TypeError(f"iterator must be an iterator, not {type(iterator).__name__}")
        if getattr(iterator, "repeat", getattr(iterator, "_repeat", False)):
            raise ValueError("the iterator never ends; make it with repeat=False")
        self.comm = comm
        self.iterator = iterator
        self.target = target
        self.device = None if device is None else chainer.get_device(device)
        self.converter = converter
        self.root = require_integer("root", root, 0, comm.size - 1)

    def calc_local(self, *args: Any, **kwargs: Any) -> Any:
        """Compute this rank's result of one batch; override it. By default what ``target`` returns.

        It is called without recording graphs, and with ``chainer.config.train`` False.

        Args:
            args: the arrays of the batch, as the converter returns them.
            kwargs: the same, where the converter returns a dict.

        Returns:
            Any picklable object. Variables and GPU arrays in it (or in tuples, lists and
            dicts in it) are sent as NumPy arrays.
        """
        return self.target(*args, **kwargs)

    def aggregate(self, results: Iterator[Any]) -> Any:
        """Combine all ranks' results at ``root``; override it. By default a list of them.

        Called once, on ``root`` only. Results that it doesn't read are discarded.

        Args:
            results: gives what ``calc_local`` returned for the first batch of each rank that
                has one, in rank order, then for the second batches, and so on.

        Returns:
            Any picklable object, which all ranks get.
        """
        return list(results)

    def __call__(self, trainer: Any = None) -> Any:
        """Evaluate, report the result if it is a dict, and return it (collective).

        ``trainer`` is not used.

        Raises:
            BaseException: whatever failed on this rank (a
                :class:`~chainermn_comm.errors.PeerError` that names it on the others).
            RankMismatchError: on all ranks, when they were given different ``root``.
        """
        result = self.evaluate()
        if isinstance(result, Mapping):
            prefix = "" if self.name is None else f"{self.name}/"
            chainer.report({f"{prefix}{key}": value for key, value in result.items()})
        return result

    def evaluate(self) -> Any:
        """Return what ``aggregate`` returns on ``root`` (collective); raise as a call does."""
        self.comm.handshake(_OPERATION, (("root", self.root),))
        failures: list[BaseException] = []
        rounds = self._rounds(failures)

        def finish_rounds() -> None:
            for _ in rounds:  # on root: those that `aggregate` left, since other ranks send them
                pass
            if failures:  # known to all ranks; what `aggregate` made of it means nothing
                raise failures.pop()  # no frame in its traceback may refer to it

        def fail(operation: str, error: BaseException) -> None:
            finish_rounds()
            self.comm.handshake(operation, error=error)

        result: Any = None
        if self.comm.rank == self.root:
            # Unpickled outside the generator: an error in there would end the rounds on this
            # rank alone. `chain` has no `close` for `aggregate` to end them with.
            results = map(pickle.loads, chain.from_iterable(rounds))
            with SharedFailure(fail, _OPERATION):
                result = to_host(self.aggregate(results))
        finish_rounds()
        return bcast_checked(self.comm, _OPERATION, lambda: result, self.root)

    def _rounds(self, failures: list[BaseException]) -> Generator[list[bytes], None, None]:
        """Yield the pickled results of each round on root, empty lists elsewhere (collective).

        Ends on all ranks at once, when none has a batch left or one fails; see ``failures`` then.
        """
        local = self._local()
        while True:
            try:
                with SharedFailure(self.comm.handshake, _OPERATION):
                    content = next(local, None)
                payload = b"" if content is None else _HAS_BATCH
                present = self.comm.handshake(_OPERATION, payload=payload)
            except BaseException as exception:
                failures.append(exception)
                return
            if not any(present):
                return
            gathered = self.comm.gather_obj(content, root=self.root) or []
            yield [content for content in gathered if content is not None]

    def _local(self) -> Generator[bytes, None, None]:
        """Yield the pickled result of each of this rank's batches."""
        iterator = self.iterator
        if hasattr(iterator, "reset"):
            iterator.reset()
        else:
            iterator = copy.copy(iterator)
        dataset = getattr(iterator, "dataset", None)
        if dataset is not None and len(dataset) == 0:
            return
        reporter = chainer.Reporter()  # else the model would report into the training's values
        if isinstance(self.target, chainer.Link):
            reporter.add_observer("main", self.target)
            reporter.add_observers("main", self.target.namedlinks(skipself=True))
        for batch in iterator:
            if len(batch) == 0:
                continue
            arrays = _call_converter(self.converter, batch, self.device)
            with reporter, chainer.using_config("train", False), chainer.no_backprop_mode():
                if isinstance(arrays, tuple):
                    output = self.calc_local(*arrays)
                elif isinstance(arrays, dict):
                    output = self.calc_local(**arrays)
                else:
                    output = self.calc_local(arrays)
            yield pickle.dumps(to_host(output), protocol=5)

    def finalize(self) -> None:
        """Release what the iterator holds."""
        if hasattr(self.iterator, "finalize"):
            self.iterator.finalize()
